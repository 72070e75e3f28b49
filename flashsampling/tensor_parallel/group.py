"""``TensorParallel``: a group of ranks, from its construction, which is in ``construction``, to its end."""

import functools
import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from .. import open_groups, ops
from ..backends import Backend
from ..exchange_protocol import Shard
from ..inputs import SampleInputs
from ..outputs import SampleResult
from ..sampling_params import DEFAULT_PARAMS
from . import capabilities, filtered_sampling, rejection
from .construction import Construction, seconds_of
from .device_thread import DeviceThread
from .failures import Failure, TensorParallelError, left
from .rendezvous import RemoteError, Rendezvous
from .serialization import MalformedError, from_bytes, to_bytes
from .sharding import process_group, rank_and_size
from .store import store_of
from .transport import DryRun, SingleRank, Transport

_USUAL_TIMEOUT = 60.0  # seconds
_LOOK_FOR_FAILURE = 0.05  # seconds
_DRAIN_AFTER_FAILURE = 1.0  # seconds

_names = itertools.count()


class TensorParallel:
    """A group of ranks that share an LM head by its vocabulary. Making one is a collective call, and so is closing it.

    It is made for one weight shard, once; ``sample(..., tp=...)`` and ``LMHeadSampler(..., tp=...)`` then take the same shard.
    All ranks call with the same hidden states and the same parameters per row, in the same order, and all get the same token
    ids: those that one rank with the whole weight would draw (bit for bit with the kernels). Steps of one group follow one
    another, on one stream or ordered by events; two groups may be at work at once, if all ranks begin their steps in the same
    order. A CUDA graph captured with a group needs it open whenever it is replayed.

    Ranks that are out of step, or whose parameters differ, exchange nothing: the group fails, on all ranks alike. What then
    happens, what cannot be noticed and how to go on stands in docs/tensor_parallel.md. A group lives until it is closed, also
    if nobody holds it: graphs and other ranks may still use its buffers.

    Args:
        group: the process group, or a one-dimensional ``DeviceMesh`` (``mesh["tp"]``); None is the default group. Sub-groups
            (tensor parallelism inside data or pipeline parallelism) are fine.
        weight: (V_shard, D), this rank's rows of the LM head; V_shard may be 0.
        first_token: token id of the shard's first row. None: shards lie one after the other in the order of the ranks.
        vocab_size: real size of the whole vocabulary where the weight is padded; ids from it on are never sampled.
        max_batch_size: rows of the largest batch; the buffers are made for it.
        max_num_samples: draws per row, at most.
        transport: "p2p", "nccl" or "gloo"; None chooses. A name never falls back.
        impl: "cute", "triton" or "streaming", the same on all ranks; None chooses the first that can do every shard.
        timeout: seconds (or a timedelta) after which a rank is given up that does not come to a step, to construction, to
            closing or to another collective call. It may come that much later than the others without harm. With nccl the
            error follows up to 3 s later.

    Attributes:
        rank: this rank in the group.
        world_size: ranks in the group.
        first_token: id of this shard's first token.
        last_token: id after this shard's last token that can be sampled.
        vocab_size: tokens of the whole vocabulary that can be sampled.
        num_rows: rows of all shards together, those of padding too.
        transport: what was chosen.
        impl: what was chosen.
        timeout: in seconds.

    Raises:
        ValueError: on every rank alike: the ranks disagree (D, dtype, kind of device, sizes, transport, impl, time-out), the
            shards overlap or leave a hole, an argument of a rank is wrong, or what was asked for by name cannot be done; it
            says which rank and why.
        TypeError: an argument is of the wrong type; the other ranks get a ValueError.
        TensorParallelTimeout: a rank did not come within ``timeout``; it gets this too when it comes. The next group works.
        TensorParallelError: another rank could not go on, for lack of memory, say; what it raises itself is the reason.

    Warns:
        RuntimeWarning: all ranks are on one host's GPUs, and the transport is not "p2p": why.

    Example:
        >>> import torch, flashsampling
        >>> from flashsampling.tensor_parallel import TensorParallel, shard_lm_head
        >>> torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
        >>> shard = shard_lm_head(torch.zeros(1000, 8))
        >>> with TensorParallel(None, shard, max_batch_size=64) as tp:  # once, on all ranks
        ...     step = flashsampling.sample(torch.zeros(3, 8), shard, seed=torch.arange(3), tp=tp)  # on all ranks
        ...     tp.check()
        ...     print(tp.transport, step.token_ids)
        gloo tensor([414, 777, 916])
        >>> torch.distributed.destroy_process_group()
    """

    def __init__(
        self,
        group: dist.ProcessGroup | DeviceMesh | None,
        weight: Tensor,  # (V_shard, D)
        *,
        first_token: int | None = None,
        vocab_size: int | None = None,
        max_batch_size: int = 256,
        max_num_samples: int = 1,
        transport: str | None = None,
        impl: str | None = None,
        timeout: float | timedelta = _USUAL_TIMEOUT,
    ) -> None:
        self._group = process_group(group)
        self.rank, self.world_size = rank_and_size(self._group)
        # asked for once, as messages need them after the process group is destroyed too
        self._global_ranks = None if self._group is None else dist.get_process_group_ranks(self._group)
        self._closed = False
        self._left_out = 0
        self._transport: Transport | None = None
        self._rendezvous: Rendezvous | None = None
        if self.world_size > 1:
            bound = _USUAL_TIMEOUT  # for telling the others that this one's is wrong
            with suppress(Exception):
                bound = given if 0 < (given := seconds_of(timeout)) <= capabilities.MAX_TIMEOUT else bound
            connect = functools.partial(store_of, self._group)
            self._rendezvous = Rendezvous(connect, self.rank, self.world_size, bound, self._who, self._store_holder())
        options = {"first_token": first_token, "vocab_size": vocab_size, "transport": transport, "impl": impl}
        options |= {"max_batch_size": max_batch_size, "max_num_samples": max_num_samples}
        making = Construction(self._group, self._rendezvous, self._store_holder())
        try:
            with torch.inference_mode(False):  # what is made inside could not be written outside
                making.run(weight, timeout, options)
        except BaseException as error:
            if self._rendezvous is not None and not isinstance(error, RemoteError):
                # ranks that do not raise it alike hear of it in the next stage, or in their first step
                self._rendezvous.declare(left(self.rank, error))
                self._rendezvous.fail("construction", error)
            self._end(everybody=True)
            if not isinstance(error, RemoteError):
                raise
            if error.kind in ("ValueError", "TypeError"):
                raise ValueError(str(error)) from None
            raise self._error(Failure("left", error.rank, what=f"{error.kind}: {error.message}")) from None
        self.weight_shape, self.dtype, self.device = weight.shape, weight.dtype, weight.device
        self.first_token, self.last_token, self.vocab_size = making.first_token, making.last_token, making.vocab_size
        self.num_rows, self._ranges = making.num_rows, making.ranges
        mine = making.mine
        self.max_batch_size, self.max_num_samples, self.timeout = (
            mine.max_batch_size,
            mine.max_num_samples,
            mine.timeout,
        )
        self.impl, self.transport, self._transport, self.shard = (
            making.impl,
            making.transport,
            making.made,
            making.shard,
        )
        self.order = ops.order_tensor(self.device)  # see ops
        self.name = str(next(_names))  # by which the torch operator finds it
        open_groups.add(self.name, self)

    def check(self, *, collective: bool = False) -> None:
        """Waits for the current stream, then raises if a step failed. After graph replays, which cannot raise themselves.

        A failure that is known already is raised before the device is asked for anything; one that becomes known meanwhile
        ends the wait. So the error can be had while an all-gather hangs, and after the device broke.

        Args:
            collective: all ranks make this call, and all learn whether any of them failed. Bounded by ``timeout``.

        Raises:
            TensorParallelError: the group has failed: TensorParallelTimeout where a rank did not take part in time,
                TensorParallelMismatch where one was at another step or had other parameters.
            ValueError: the group has been closed.
        """
        self.raise_if_unusable()
        if self.device.type == "cuda":
            try:
                self._wait_for_stream()
            except RuntimeError as error:
                failure = self._failure()
                if failure is None and collective and self._transport is not None:
                    self._transport.declare(left(self.rank, error))
                if failure is None:
                    raise
                raise self._error(failure) from error
        self.raise_if_unusable()
        if collective:
            self._collective("a collective check", b"")

    def _wait_for_stream(self) -> None:
        """Until the current stream is done, or the group has failed."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        pause, looked = 2e-5, time.monotonic()
        while not event.query():
            now = time.monotonic()
            if now - looked > _LOOK_FOR_FAILURE:
                looked = now
                if self._failure() is not None:
                    return
            time.sleep(pause)
            pause = min(pause * 1.5, 1e-3)

    def broadcast(
        self, values: Any, error: Exception | None = None, must_match: Mapping[str, Any] | None = None
    ) -> Any:
        """The first rank's ``values`` on every rank. A collective, bounded by ``timeout``.

        Through the process group's store, whatever its backend: for some KiB of parameters.

        Args:
            values: what is given on this rank: None, bools, numbers, strings, tensors on the CPU, and lists, tuples and
                dictionaries of these.
            error: why nothing can be given. It is raised here, and a ValueError that names this rank on the others.
            must_match: what must be the same on all ranks, by name.

        Raises:
            TypeError: ``values`` holds something else; the other ranks get a ValueError that says so.
            ValueError: a rank had an ``error``, or ``must_match`` is not the same, on all ranks; or the group has been closed.
            TensorParallelError: a rank did not come, the group has failed, or the store holds what no rank wrote.
        """
        phase = "a broadcast"
        if error is not None:
            if self._rendezvous is not None:
                self.raise_if_unusable()
                self._rendezvous.fail(phase, error)
            raise error
        try:
            mine = to_bytes((values if self.rank == 0 else None, dict(must_match or {})))
        except Exception as unsaid:  # else the others take this rank's next call for this one
            return self.broadcast(None, unsaid)
        payloads = self._collective(phase, mine)
        if self._rendezvous is None:
            said = [_broadcast_of(payload) for payload in payloads]
        else:
            try:
                said = self._rendezvous.read(_broadcast_of, phase, payloads)
            except TensorParallelError as malformed:
                raise self._declared(malformed) from malformed
        for name in said[0][1]:
            given = [other.get(name) for _, other in said]
            if any(other != given[0] for other in given):
                raise ValueError(f"{name} must be the same on all ranks, got {capabilities.by_rank(given)}")
        return said[0][0]

    def _collective(self, phase: str, payload: bytes) -> list[bytes]:
        self.raise_if_unusable()
        if self._transport is None or self._rendezvous is None:
            return [payload]
        try:
            return self._rendezvous.exchange(phase, payload, failure=self._transport.failure)  # type: ignore[return-value]
        except RemoteError as error:
            raise ValueError(str(error)) from None
        except TensorParallelError as error:
            raise self._declared(error) from error

    def _declared(self, error: TensorParallelError) -> TensorParallelError:
        """The error of the group, which has failed by this one, if it had not before."""
        if self._transport is None:
            return error
        failure = self._transport.declare(error.failure)
        self._transport.drain()
        return self._error(failure)

    def close(self) -> None:
        """Gives the buffers back, once all ranks are here and their devices done. A collective; calling it twice is fine.

        Graphs captured with the group must not be replayed after it. After a failure it does not wait for the rank that failed;
        buffers that this rank, or an all-gather that hangs, may still touch are then kept until the process ends.

        Raises:
            TensorParallelTimeout: a rank did not come within ``timeout``, and the group had not failed before. It is closed all
                the same.
        """
        if self._closed:
            return
        self._closed = True
        open_groups.remove(self.name)
        everybody = False
        try:
            everybody = self._agree_to_close()
        finally:
            self._end(everybody)

    def _agree_to_close(self) -> bool:
        """Whether all ranks are here, and their devices done with the buffers."""
        transport, meet = self._transport, self._rendezvous
        if transport is None or meet is None:
            return self._drain()
        transport.drain()
        with meet.busy():
            done = self._drain()

        def failure() -> Failure | None:
            return transport.failure() or meet.known()  # a transport may hear of it in its next step only

        def excused() -> Sequence[int]:
            transport.drain()  # whoever is not here yet may wait for its device
            failed = failure()
            return () if failed is None else (failed.rank,)

        known = failure() is not None
        try:
            said = meet.exchange("closing", b"done" if done else b"busy", excused=excused)
        except TensorParallelError as error:
            meet.post("closing")  # whoever was in another call closes after this one, and need not wait for it
            if known:  # before: it closes as a group that has failed
                return False
            raise self._error(transport.declare(error.failure)) from error
        meet.part(sum(payload is not None for payload in said))
        return all(payload == b"done" for payload in said)

    def _drain(self) -> bool:
        """Waits for the device; once the group has failed, not for long. Whether it is done."""
        if self.device.type != "cuda":
            return True
        waiting = DeviceThread(lambda: torch.cuda.synchronize(self.device), self.device)
        while not waiting.ends_within(_LOOK_FOR_FAILURE):
            if self._failure() is not None and not waiting.ends_within(_DRAIN_AFTER_FAILURE):
                return False
        return waiting.error is None

    def _end(self, everybody: bool) -> None:
        try:
            if self._transport is not None:
                self._transport.close(everybody)
        finally:
            if self._rendezvous is not None:
                self._rendezvous.end()

    def __deepcopy__(self, memo: dict[int, Any]) -> "TensorParallel":
        """Itself, as it is for a copy of a module that has it: a group is made by all ranks."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError(
            "a TensorParallel cannot be pickled: it is this process's part of a group. Save weights, make it anew"
        )

    def __enter__(self) -> "TensorParallel":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Closes. If an exception leaves the block: the group fails, so that no rank waits for this one, nor this for any."""
        if error is None or self._closed:
            self.close()
            return
        self._closed = True
        open_groups.remove(self.name)
        if self._transport is not None and self._rendezvous is not None:
            self._transport.declare(left(self.rank, error))
            self._transport.drain()
            self._rendezvous.post("closing")
        self._end(everybody=False)

    def __repr__(self) -> str:
        return (
            f"TensorParallel(rank={self.rank}, world_size={self.world_size}, tokens=[{self.first_token}, {self.last_token}) of "
            f"{self.vocab_size}, transport={self.transport!r}, impl={self.impl!r})"
        )

    def check_call(self, weight: Tensor, batch: int, num_samples: int) -> None:
        """Raises what ``sample`` documents if this group cannot do the call."""
        if weight.shape != self.weight_shape or weight.dtype != self.dtype or weight.device != self.device:
            raise ValueError(
                f"weight must be the shard that tp was made with, {tuple(self.weight_shape)} {self.dtype} on {self.device}, "
                f"got {tuple(weight.shape)} {weight.dtype} on {weight.device}"
            )
        if batch > self.max_batch_size:
            raise ValueError(
                f"hidden_states must have at most tp.max_batch_size = {self.max_batch_size} rows, got {batch}"
            )
        if num_samples > self.max_num_samples:
            raise ValueError(
                f"num_samples must be at most tp.max_num_samples = {self.max_num_samples}, got {num_samples}"
            )

    @property
    def skipped_calls(self) -> int:
        """Calls with this group that exchanged nothing, since they raised before or had no rows. They count as steps: a rank
        whose call raised while the others' did not is out of step with them from then on, and all learn of it."""
        return self._left_out

    @skipped_calls.setter
    def skipped_calls(self, count: int) -> None:
        self._left_out = count
        if self._transport is not None:
            with suppress(RuntimeError):  # a broken device's: what the call raised says more
                self._transport.skipped_calls = count

    def count_skipped_call(self) -> None:
        """One more call with this group that took no part in a step."""
        self.skipped_calls += 1

    @property
    def part(self) -> tuple[int, Shard]:
        """Of a step: how many tokens of the shard there are, and what a kernel is told of it."""
        return self.last_token - self.first_token, self.shard

    def compare(self, step: SampleInputs) -> None:
        """Before the launch of a step that asks for something, or has drafts to be matched, and is done as a plain one."""
        if self._transport is not None:
            self._transport.compare(step._replace(vocab_size=self.vocab_size))

    def finish(
        self,
        out: Tensor,  # (B * num_samples,) int64
        step: SampleInputs,
    ) -> Tensor:
        """Token ids from what a kernel wrote: packed winners, or the tokens themselves where it did the exchange."""
        if self._transport is None:
            return out
        if step.params is not DEFAULT_PARAMS:  # which is the whole vocabulary's
            step = step._replace(vocab_size=self.vocab_size)
        return self._transport.finish(out, step)

    def draw(self, backend: Backend, step: SampleInputs) -> SampleResult:
        """A step that asks for more than one launch does of a shard, whose ``params`` is the whole vocabulary's; or one with
        drafts to be rejected."""
        if self._transport is None and step.drafted is None:
            return backend.run(step)
        part = filtered_sampling.Part(
            self._transport or SingleRank(), backend, self._ranges, self.rank, self.vocab_size
        )
        return (filtered_sampling.draw if step.drafted is None else rejection.reject)(part, step)

    def dry_run(self, backend: Backend, step: SampleInputs) -> SampleResult:
        """``draw`` of a step that asks for something, but without other ranks, who need not know of it: for what it compiles.
        What it gives means nothing."""
        if self._transport is None:
            return backend.run(step)
        if backend.runs_on_shard(step):
            return backend.run(step._replace(shard=self._transport.dry_run_transport(self.first_token)))
        rounds = DryRun(self.world_size, self._transport.room, self._transport.skips)
        return filtered_sampling.draw(
            filtered_sampling.Part(rounds, backend, self._ranges, self.rank, self.vocab_size), step
        )

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Around what each rank does by itself, for however long: at the end all wait for all, as long as their processes live.
        An exception of one rank reaches them all.

        Raises:
            ValueError: another rank raised something, which it says; or, at once, the group has been closed.
            TensorParallelError: the group has failed (at once, if that is known), or a rank did not come here within
                ``timeout`` and is not busy.
        """
        self.raise_if_unusable()
        phase = "the end of what ranks do by themselves"
        with nullcontext() if self._rendezvous is None else self._rendezvous.busy(phase):
            yield
        self._collective(phase, b"")

    def raise_if_unusable(self) -> None:
        """Raises if the group is closed, or if a step failed by now. Asks no device."""
        if self._closed:
            raise ValueError("tp must be open, it has been closed")
        if self._transport is not None and (failure := self._transport.failure()) is not None:
            self._transport.drain()
            raise self._error(failure)

    def raise_if_failed(self) -> None:
        """Raises if a step failed by now. Asks no device, and leaves catching up to the next call, so any thread may."""
        if (failure := self._failure()) is not None:
            raise self._error(failure)

    def _failure(self) -> Failure | None:
        return None if self._transport is None else self._transport.failure()

    def _error(self, failure: Failure) -> TensorParallelError:
        return failure.error(self._who(failure.rank), self._rendezvous.seconds if self._rendezvous else self.timeout)

    def _who(self, rank: int) -> str:
        return f"rank {rank}" + ("" if self._global_ranks is None else f" (global rank {self._global_ranks[rank]})")

    def _store_holder(self) -> int:
        """The rank whose process holds the process group's store, unless the launcher's does."""
        return self._global_ranks.index(0) if self._global_ranks and 0 in self._global_ranks else 0


def _broadcast_of(payload: bytes) -> tuple[Any, dict[str, Any]]:
    """What a rank gives to a broadcast: its values, and what must be alike."""
    said = from_bytes(payload)
    if not (isinstance(said, tuple) and len(said) == 2 and isinstance(said[1], dict)):
        raise MalformedError("a broadcast is values and what must be alike")
    return said
