"""``TensorParallel``: a group of ranks that share an LM head."""

import functools
import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from .. import ops
from ..backends import Backend
from ..exchange_protocol import Shard
from ..inputs import SampleInputs
from ..outputs import SampleResult
from ..sampling_params import DEFAULT_PARAMS
from . import capabilities, filtered_sampling
from .construction import Construction, parse_timeout
from .device_thread import DeviceThread
from .failures import Failure, TensorParallelError, abort_failure
from .rendezvous import RemoteError, Rendezvous
from .serialization import MalformedError, to_text
from .sharding import process_group, rank_and_size
from .store import open_store
from .transport import Collectives, SingleRank, Transport

_USUAL_TIMEOUT = 60.0  # seconds
_LOOK_FOR_FAILURE = 0.05  # seconds
_DRAIN_AFTER_FAILURE = 1.0  # seconds

_names = itertools.count()


class TensorParallel:
    """A group of ranks that share an LM head by its vocabulary. Making and closing a group are collective calls.

    A group is made once, for one weight shard. ``sample(..., tp=...)`` and ``LMHeadSampler(..., tp=...)`` take the same
    shard. All ranks call with the same hidden states and the same parameters per row, in the same order. All get the
    token ids that one rank with the whole weight would draw (bit for bit with the kernels). Steps of one group follow
    one another, on one stream or ordered by events. Two groups may be at work at once if all ranks begin their steps in
    the same order. A group must be open whenever a CUDA graph captured with it is replayed.

    If ranks are desynchronised or their parameters differ, no winner is exchanged and the group fails on all ranks.
    docs/tensor_parallel.md describes failures, their limits and how to continue. A group lives until it is closed, even
    without a reference to it, because graphs and other ranks may still use its buffers.

    Args:
        group: the process group, or a one-dimensional ``DeviceMesh`` (``mesh["tp"]``); None is the default group.
            Sub-groups (tensor parallelism inside data or pipeline parallelism) work too.
        weight: (V_shard, D), this rank's rows of the LM head; V_shard may be 0.
        first_token: token id of the shard's first row. None: shards follow one another in the order of the ranks.
        vocab_size: real size of the whole vocabulary if the weight is padded; ids from it on are never sampled.
        max_batch_size: rows of the largest batch; buffers are made for it.
        max_num_samples: the most draws per row.
        transport: "p2p", "nccl" or "gloo"; None chooses. A named transport never falls back.
        impl: "cute", "triton" or "streaming", the same on all ranks; None chooses the first that can do every shard.
        timeout: seconds (or a timedelta) to wait for a rank in a step, in construction, in closing and in other
            collective calls. With nccl the error follows up to 3 s later.

    Attributes:
        rank: this rank in the group.
        world_size: ranks in the group.
        first_token: id of this shard's first token.
        last_token: id after this shard's last token that can be sampled.
        vocab_size: tokens of the whole vocabulary that can be sampled.
        num_rows: rows of all shards together, with padding.
        transport: name of the chosen transport.
        impl: name of the chosen backend.
        timeout: seconds.

    Raises:
        ValueError: on every rank: the ranks disagree (D, dtype, kind of device, sizes, transport, impl, time-out), the
            shards overlap or leave a hole, an argument of a rank is wrong, or a named transport or backend cannot be
            used. The message names the rank and the reason.
        TypeError: an argument has the wrong type; the other ranks raise a ValueError.
        TensorParallelTimeout: a rank did not come within ``timeout``; the late rank raises it too. The next group
            works.
        TensorParallelError: another rank could not continue, for lack of memory, say; that rank raises its own
            exception.

    Warns:
        RuntimeWarning: all ranks are on GPUs of one host and the transport is not "p2p"; the message says why.

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
        # read now: messages name ranks after the process group is destroyed too
        self._global_ranks = None if self._group is None else dist.get_process_group_ranks(self._group)
        self._closed = False
        self._skipped_calls = 0
        bound = _USUAL_TIMEOUT  # if this rank's time-out is invalid, it must still tell its peers
        with suppress(Exception):
            bound = given if 0 < (given := parse_timeout(timeout)) <= capabilities.MAX_TIMEOUT else bound
        connect = dist.HashStore if self.world_size == 1 else functools.partial(open_store, self._group)
        # the rank whose process holds the process group's store, unless the launcher's process holds it
        host = self._global_ranks.index(0) if self._global_ranks and 0 in self._global_ranks else 0
        self._rendezvous = Rendezvous(connect, self.rank, self.world_size, bound, self._who, host)
        self._transport: Transport = SingleRank()
        options = {"first_token": first_token, "vocab_size": vocab_size, "transport": transport, "impl": impl}
        options |= {"max_batch_size": max_batch_size, "max_num_samples": max_num_samples}
        making = Construction(self._group, self._rendezvous)
        try:
            with torch.inference_mode(False):  # buffers made in inference mode could not be written outside it
                making.run(weight, timeout, options)
        except BaseException as error:
            if not isinstance(error, RemoteError):
                # peers that do not raise the same error learn of it in the next stage or in their first step
                self._rendezvous.fail(error)
                self._rendezvous.declare(abort_failure(self.rank, error))
            self._transport = making.transport
            self._end(all_done=True)  # no step has begun
            if not isinstance(error, RemoteError):
                raise
            if error.kind in ("ValueError", "TypeError"):
                raise ValueError(str(error)) from None
            failure = Failure("aborted", error.rank, what=f"{error.kind}: {error.message}")
            raise self._rendezvous.error(failure) from None
        self.weight_shape, self.dtype, self.device = weight.shape, weight.dtype, weight.device
        self.first_token, self.last_token, self.vocab_size = making.first_token, making.last_token, making.vocab_size
        self.num_rows, self._ranges, own = making.num_rows, making.ranges, making.own
        self.max_batch_size, self.max_num_samples, self.timeout = own.max_batch_size, own.max_num_samples, own.timeout
        self.impl, self.transport, self._transport = making.impl, making.transport_name, making.transport
        self.shard = making.shard
        self.order = ops.order_tensor(self.device)
        self.name = str(next(_names))  # the torch operator finds the group by its name
        ops.open_groups[self.name] = self

    def check(self, *, collective: bool = False) -> None:
        """Waits for the current stream, then raises if a step failed. Needed after graph replays, which cannot raise.

        A known failure is raised before any device call, and a failure that becomes known meanwhile ends the wait. The
        error is therefore raised while an all-gather hangs, too, and after the device broke.

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
                failure = self._transport.failure()
                if failure is None and collective:
                    self._transport.declare(abort_failure(self.rank, error))
                if failure is None:
                    raise
                raise self._rendezvous.error(failure) from error
        self.raise_if_unusable()
        if collective:
            self._collective("a collective check")

    def _wait_for_stream(self) -> None:
        """Waits until the current stream is done or the group has failed."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        pause, looked = 2e-5, time.monotonic()
        while not event.query():
            now = time.monotonic()
            if now - looked > _LOOK_FOR_FAILURE:
                looked = now
                if self._transport.failure() is not None:
                    return
            time.sleep(pause)
            pause = min(pause * 1.5, 1e-3)

    def broadcast(
        self, values: Any, error: Exception | None = None, must_match: Mapping[str, Any] | None = None
    ) -> Any:
        """Returns the first rank's ``values`` on every rank. A collective call, bounded by ``timeout``.

        Goes through the process group's store, whatever its backend, and is meant for some KiB of parameters.

        Args:
            values: None, bools, numbers, strings, tensors on the CPU, and lists, tuples and dictionaries of these.
            error: an exception in place of values. It is raised here; the other ranks raise a ValueError with this
                rank's name.
            must_match: values that must be the same on all ranks, by name.

        Raises:
            TypeError: ``values`` holds another type; the other ranks raise a ValueError.
            ValueError: a rank had an ``error``, or ``must_match`` differs between ranks; or the group has been closed.
            TensorParallelError: a rank did not come, the group has failed, or the store holds bytes that no rank
                writes.
        """
        if error is not None:
            self.raise_if_unusable()
            self._rendezvous.fail(error)
            raise error
        own = values if self.rank == 0 else None, dict(must_match or {})
        try:
            to_text(own)
        except Exception as not_encodable:  # take part all the same, or peers would take the next call for this one
            return self.broadcast(None, not_encodable)
        by_rank = self._collective("a broadcast", own, _check_broadcast)
        for name in by_rank[0][1]:
            given = [fields.get(name) for _, fields in by_rank]
            if any(value != given[0] for value in given):
                raise ValueError(f"{name} must be the same on all ranks, got {capabilities.by_rank(given)}")
        return by_rank[0][0]

    def _collective(
        self, phase: str, value: Any = None, check: Callable[[Any], Any] = lambda value: value
    ) -> list[Any]:
        self.raise_if_unusable()
        try:
            return self._rendezvous.exchange(phase, value, check, self._transport.failure)
        except RemoteError as error:
            raise ValueError(str(error)) from None
        except TensorParallelError as error:
            failure = self._transport.declare(error.failure)
            self._transport.drain()
            raise self._rendezvous.error(failure) from error

    def close(self) -> None:
        """Frees the buffers once all ranks are here and their devices are done. A collective call; calling twice is
        fine.

        Graphs captured with the group must not be replayed afterwards. After a failure, ``close`` does not wait for the
        rank that failed, and keeps buffers that this rank, or an all-gather that hangs, may still touch.

        Raises:
            TensorParallelError: the group failed while it closed, TensorParallelTimeout where a rank did not come
                within ``timeout``. The group is closed all the same.
        """
        if self._closed:
            return
        self._closed = True
        ops.open_groups.pop(self.name, None)
        all_done = False
        try:
            all_done = self._agree_to_close()
        finally:
            self._end(all_done)

    def _agree_to_close(self) -> bool:
        """Returns whether all ranks are here and their devices are done with the buffers."""
        transport, rendezvous = self._transport, self._rendezvous
        transport.drain()
        with rendezvous.heartbeat():
            done = self._wait_for_device()

        def failure() -> Failure | None:
            # gloo and p2p may learn of it only in their next step
            return transport.failure() or rendezvous.try_declared()

        def culprit() -> int | None:
            transport.drain()  # a rank that is missing may wait for its device
            failed = failure()
            return None if failed is None else failed.rank

        if failure() is not None:
            with suppress(TensorParallelError):
                return rendezvous.close(done, culprit)
            return False
        try:
            done = rendezvous.close(done, culprit)
        except TensorParallelError as error:
            raise rendezvous.error(transport.declare(error.failure)) from error
        if (failed := failure()) is not None:
            raise rendezvous.error(failed)
        return done

    def _wait_for_device(self) -> bool:
        """Waits for the device, but not for long once the group has failed. Returns whether the device is done."""
        if self.device.type != "cuda":
            return True
        waiting = DeviceThread(lambda: torch.cuda.synchronize(self.device), self.device)
        while not waiting.ends_within(_LOOK_FOR_FAILURE):
            if self._transport.failure() is not None and not waiting.ends_within(_DRAIN_AFTER_FAILURE):
                return False
        return waiting.error is None

    def _end(self, all_done: bool) -> None:
        goes_on = False
        try:
            goes_on = self._transport.close(all_done)
        finally:
            if not goes_on:
                self._rendezvous.store.end()

    def __deepcopy__(self, memo: dict[int, Any]) -> "TensorParallel":
        """Returns itself: only all ranks together can make another group, and copies of a module share this one."""
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
        """Closes the group. If an exception leaves the block, the group fails, so that no rank waits for another."""
        if error is None or self._closed:
            self.close()
            return
        self._closed = True
        ops.open_groups.pop(self.name, None)
        self._transport.declare(abort_failure(self.rank, error))
        self._transport.drain()
        self._rendezvous.leave()
        self._end(all_done=False)

    def __repr__(self) -> str:
        return (
            f"TensorParallel(rank={self.rank}, world_size={self.world_size}, "
            f"tokens=[{self.first_token}, {self.last_token}) of {self.vocab_size}, transport={self.transport!r}, "
            f"impl={self.impl!r})"
        )

    def check_call(self, weight: Tensor, batch: int, num_samples: int) -> None:
        """Raises what ``sample`` documents if this group cannot do the call."""
        if weight.shape != self.weight_shape or weight.dtype != self.dtype or weight.device != self.device:
            raise ValueError(
                f"weight must be the shard that tp was made with, {tuple(self.weight_shape)} {self.dtype} on "
                f"{self.device}, got {tuple(weight.shape)} {weight.dtype} on {weight.device}"
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
        """Number of calls with this group that exchanged nothing, because they raised before or had no rows.

        They count as steps. If the call of one rank raises and those of its peers do not, that rank is desynchronised,
        and all ranks learn of it in the next step."""
        return self._skipped_calls

    @skipped_calls.setter
    def skipped_calls(self, count: int) -> None:
        self._skipped_calls = count
        with suppress(RuntimeError):  # from a broken device; the exception of the call says more
            self._transport.set_skipped_calls(count)

    def count_skipped_call(self) -> None:
        """Counts a call with this group that took no part in a step."""
        self.skipped_calls += 1

    @property
    def part(self) -> tuple[int, Shard]:
        """The shard's number of tokens that can be sampled, and its description for kernels."""
        return self.last_token - self.first_token, self.shard

    def compare(self, step: SampleInputs) -> None:
        """Compares parameters and draft hash before the launch of a step that runs as a plain one."""
        self._transport.compare(step._replace(vocab_size=self.vocab_size))

    def finish(
        self,
        out: Tensor,  # (B * num_samples,) int64
        step: SampleInputs,
    ) -> Tensor:
        """Returns token ids from a kernel's output: packed winners, or token ids if the kernel did the exchange."""
        if step.params is not DEFAULT_PARAMS:  # parameters are those of the whole vocabulary
            step = step._replace(vocab_size=self.vocab_size)
        return self._transport.finish(out, step)

    def draw(self, backend: Backend, step: SampleInputs) -> SampleResult:
        """Runs a step whose rows need the whole vocabulary's logits, or one with drafts for rejection sampling.

        ``step.params`` are those of the whole vocabulary."""
        if self.world_size == 1 and step.drafted is None:
            return backend.run(step)
        return filtered_sampling.draw(self._part(self._transport, backend), step)

    def dry_run(self, backend: Backend, step: SampleInputs) -> SampleResult:
        """Runs ``draw`` without other ranks, to compile its kernels. The result has no meaning."""
        if self.world_size == 1:
            return backend.run(step)
        if backend.runs_on_shard(step):
            return backend.run(step._replace(shard=self._transport.dry_run_transport(self.first_token)))
        return filtered_sampling.draw(self._part(self._transport.dry_run(), backend), step)

    def _part(self, transport: Collectives, backend: Backend) -> filtered_sampling.Part:
        return filtered_sampling.Part(transport, backend, self._ranges, self.rank, self.vocab_size)

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Surrounds work that each rank does by itself, for any time.

        At the end all ranks wait for each other while they live. An exception of one rank reaches them all.

        Raises:
            ValueError: another rank raised an exception, which the message holds; or the group has been closed (at
                once).
            TensorParallelError: the group has failed (at once, if known), or a rank did not come within ``timeout`` and
                is not in this block.
        """
        self.raise_if_unusable()
        with self._rendezvous.heartbeat():
            yield
        self._collective("the end of what ranks do by themselves")

    def raise_if_unusable(self) -> None:
        """Raises if the group is closed or a step has failed. Makes no device call."""
        if self._closed:
            raise ValueError("tp must be open, it has been closed")
        if (failure := self._transport.failure()) is not None:
            self._transport.drain()
            raise self._rendezvous.error(failure)

    def raise_if_failed(self) -> None:
        """Raises if a step has failed. Makes no device call and drains nothing, so any thread may call it."""
        if (failure := self._transport.failure()) is not None:
            raise self._rendezvous.error(failure)

    def _who(self, rank: int) -> str:
        return f"rank {rank}" + ("" if self._global_ranks is None else f" (global rank {self._global_ranks[rank]})")


def _check_broadcast(value: Any) -> tuple[Any, dict[str, Any]]:
    """Returns a rank's values and the fields that must match."""
    match value:
        case (values, dict(fields)):
            return values, fields
    raise MalformedError("a broadcast is values and fields that must match")
