"""How ranks make a group: all agree, make the same transport, and compile their kernels ahead.

Each stage ends with an exchange, so that all ranks learn what any of them raised in it, and none goes on alone:

    construction              what each rank has and was asked for; all conclude the same from it (``agreement``)
    mapping peers' memory     p2p; where that cannot be done, and p2p was not asked for by name, the next transport is taken
    making buffers            nccl and gloo
    connecting                nccl and gloo: a first message
    the end of construction   kernels are compiled, and have run once
"""

import functools
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..backends import BACKENDS
from ..exchange_protocol import Shard
from ..inputs import SampleInputs
from ..row_params import integer, real
from ..sampling import check_kind
from ..warmup import plan
from . import capabilities
from .device_thread import DeviceThread
from .failures import TensorParallelError, left
from .filtered_sampling import LEAST_WORDS, ROW_WORDS
from .gloo import Gloo
from .nccl import Nccl
from .p2p import PeerToPeer, room_for_digits
from .rendezvous import RemoteError, Rendezvous
from .serialization import record_from_json, record_to_json
from .transport import Transport

_LOOK_FOR_FAILURE = 0.1  # seconds
# seconds for a first message, however short the time-out of steps: in it NCCL makes its communicator
_LEAST_TO_CONNECT = {"gloo": 15.0, "nccl": 60.0}


class Construction:
    """This rank's part in it: ``run``, and what that leaves in the attributes.

    Args:
        group: the process group, None for the default one.
        meet: the group's; None for one rank alone.
        holder: rank that probably holds the store.

    Attributes:
        mine: what this rank told the others; of its sizes and its time-out they said the same.
        first_token: id of this shard's first token.
        last_token: id after this shard's last token that can be sampled.
        vocab_size: tokens of the whole vocabulary that can be sampled.
        num_rows: rows of all shards together, those of padding too.
        ranges: ids of every rank's tokens that can be sampled, [first, last), by rank.
        impl: what was chosen.
        transport: what was chosen, by name.
        made: it; None for one rank alone.
        shard: what a kernel is told.
    """

    mine: capabilities.RankCapabilities
    first_token: int
    last_token: int
    vocab_size: int
    num_rows: int
    ranges: list[tuple[int, int]]
    impl: str
    transport: str
    shard: Shard

    def __init__(self, group: dist.ProcessGroup | None, meet: Rendezvous | None, holder: int) -> None:
        self._group, self._meet, self._holder = group, meet, holder
        self.made: Transport | None = None

    def run(self, weight: Tensor, timeout: float | timedelta, options: dict[str, Any]) -> None:
        """A collective. Raises what ``TensorParallel`` does, but a RemoteError where another rank raised; nothing is left then.

        Args:
            weight: (V_shard, D), unchecked, as all that users give.
            timeout: seconds, or a timedelta.
            options: the other arguments of ``TensorParallel``, by name.
        """
        try:
            members = self._agree(weight, timeout, options)
            self.impl = capabilities.choose_impl(members)
            self.transport, no_p2p = capabilities.choose_transport(members, self.impl)
            if self._meet is not None:
                no_p2p = self._make_transport(self._meet, members, weight.device) or no_p2p
            if no_p2p is not None:
                message = f"transport 'p2p' cannot be used ({no_p2p}); it is {self.transport!r} instead"
                warnings.warn(message, RuntimeWarning, stacklevel=3)
            self.shard = Shard(self.first_token) if self.made is None else self.made.shard(self.first_token)
            self._stage("the end of construction", lambda: self._compile(weight))
        except BaseException as error:
            if self.made is not None:
                if isinstance(self.made, Gloo) and self._meet is not None and not isinstance(error, RemoteError):
                    self.made.declare(
                        left(self._meet.rank, error)
                    )  # others may be in their first step, and hear of it there
                    self.made.drain()
                self.made.close(True)  # no step was made
            raise

    def _stage(self, phase: str, work: Callable[[], bytes | None]) -> list[bytes]:
        """What ``work`` gives on all ranks, which wait for each other's as long as they live. An exception reaches them all."""
        meet = self._meet
        with nullcontext() if meet is None else meet.busy(phase):
            mine = work() or b""
        return [mine] if meet is None else meet.exchange(phase, mine)  # type: ignore[return-value]

    def _agree(
        self, weight: Tensor, timeout: float | timedelta, options: dict[str, Any]
    ) -> list[capabilities.RankCapabilities]:
        """What the ranks said, by rank; it fits together."""

        def describe() -> bytes:
            check_kind("weight", weight)
            if weight.is_meta:
                raise TypeError("weight must hold values, got one on the meta device")
            if weight.is_cuda and torch.cuda.is_current_stream_capturing():
                raise RuntimeError(
                    "TensorParallel must be made before a CUDA graph is captured: the stream is being captured"
                )
            for name in ("max_batch_size", "max_num_samples", "first_token", "vocab_size"):
                if options[name] is not None or name.startswith("max"):
                    options[name] = integer(name, options[name])
            for name in ("transport", "impl"):
                if not isinstance(options[name], str | None):
                    raise TypeError(f"{name} must be a str or None, got {type(options[name]).__name__}")
            backends = str(dist.get_backend_config(self._group))
            return record_to_json(
                capabilities.rank_capabilities(weight, seconds_of(timeout), backends, **options)
            ).encode()

        said = self._stage("construction", describe)
        read = functools.partial(record_from_json, capabilities.RankCapabilities)
        members = [read(mine) for mine in said] if self._meet is None else self._meet.read(read, "construction", said)
        ranges = capabilities.check(members)
        rank = 0 if self._meet is None else self._meet.rank
        self.mine = members[rank]
        self.first_token, self.last_token = ranges[rank]
        self.ranges, self.vocab_size = ranges, max(last for _, last in ranges)
        self.num_rows = sum(rank_capabilities.shape[0] for rank_capabilities in members)
        return members

    def _make_transport(
        self, meet: Rendezvous, members: list[capabilities.RankCapabilities], device: torch.device
    ) -> str | None:
        """Why p2p cannot be used, if it was tried and could not."""
        why, rows, seconds = None, self.mine.max_batch_size, self.mine.timeout
        capacity = max(rows * self.mine.max_num_samples, rows * ROW_WORDS, LEAST_WORDS)
        if self.transport == "p2p":
            why = self._make_p2p(meet, device, max(capacity, room_for_digits(rows, meet.ranks)))
            if why is None:
                return None
            if members[0].transport == "p2p":
                raise ValueError(f"transport='p2p' cannot be used ({why})")
            self.transport, _ = capabilities.choose_transport(members, self.impl, no_p2p=why)

        def make() -> bytes | None:
            if self.transport != "gloo":
                self.made = Nccl(self._group, meet, device, rows, capacity, seconds, self._holder)
                return None
            self.made = gloo = Gloo(self._group, meet, rows, capacity, seconds)
            closed = gloo.closed()
            return None if closed is None else closed.encoded().encode()

        phase = "making buffers"
        for said in filter(None, self._stage(phase, make)):  # the first that any rank knows, on all ranks
            failure = meet.failure_of(phase, said)
            raise failure.error(meet.who(failure.rank), seconds)
        made: Any = self.made
        bound = max(seconds, _LEAST_TO_CONNECT[self.transport])

        def connect() -> None:
            # in a thread: another rank may fail just now, and NCCL waits for one that is dead without a bound that is ours
            first_message = functools.partial(made.connect, bound) if isinstance(made, Gloo) else made.connect
            connecting, until = DeviceThread(first_message, device), time.monotonic() + bound
            while not connecting.ends_within(_LOOK_FOR_FAILURE):
                if meet.over():  # the exchange behind this raises why
                    return
                if isinstance(made, Nccl) and time.monotonic() > until:
                    raise TimeoutError(f"NCCL did not connect the ranks within {bound:g} s")
            connecting.result()

        self._stage("connecting", connect)
        return why

    def _make_p2p(self, meet: Rendezvous, device: torch.device, capacity: int) -> str | None:
        """None, or why not where memory that should be mapped cannot be (a container without the right to, say)."""
        try:
            mine = self.mine
            self.made = PeerToPeer(meet, device, capacity, mine.timeout, mine.max_batch_size, mine.max_num_samples)
            meet.exchange("mapping peers' memory", b"")
            return None
        except TensorParallelError:
            raise
        except Exception as error:
            agreed = error if isinstance(error, RemoteError) else meet.fail("mapping peers' memory", error)
            if self.made is not None:
                self.made.close(True)
                self.made = None
            if not isinstance(agreed, RemoteError):
                raise agreed from error
            if agreed.kind in ("OutOfMemoryError", "MemoryError"):
                raise
            return f"rank {agreed.rank}: {agreed.message}"

    def _compile(self, weight: Tensor) -> None:
        """Compiles the kernels, and runs them once, without meeting other ranks: a step in which one did would be late."""
        if not weight.is_cuda or not BACKENDS[self.impl].compiles:
            return
        shard = self.shard if self.made is None else self.made.dry_run_transport(self.first_token)
        run, vocab = BACKENDS[self.impl].run, self.last_token - self.first_token
        with torch.cuda.device(weight.device):
            for num_samples in sorted({1, self.mine.max_num_samples}):

                def draw(
                    states: Tensor, temperature: Tensor | float, zeros: Tensor, num_samples: int = num_samples
                ) -> None:
                    run(SampleInputs(states, weight, temperature, zeros, zeros, num_samples, vocab, shard))

                made = plan(weight, self.mine.max_batch_size, num_samples, self.impl, None)
                made.compile(weight, draw)
                made.draw(weight, draw)
            torch.cuda.current_stream().synchronize()


def seconds_of(timeout: float | timedelta) -> float:
    """A time-out in seconds, as the user gave it. TypeError for what is no number."""
    if isinstance(timeout, timedelta):
        return timeout.total_seconds()
    return real("timeout", timeout, lambda _, value: float(value))
