"""Constructs a group: ranks exchange capabilities, make the same transport and compile their kernels ahead.

Each stage ends with an exchange. All ranks thereby learn of an exception in any of them, and none continues alone:

    construction              capability exchange; all ranks conclude the same from it (``capabilities``)
    mapping peers' memory     p2p; if that fails and p2p was not named, the next transport is taken
    making buffers            nccl and gloo
    connecting                nccl and gloo: a first message
    the end of construction   kernels are compiled and have run once
"""

import functools
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ..backends import BACKENDS
from ..exchange_protocol import Shard
from ..inputs import example
from ..row_params import integer, real
from ..sampling import check_kind
from ..warmup import make_plan
from . import capabilities
from .device_thread import DeviceThread
from .failures import TensorParallelError
from .gloo import Gloo
from .nccl import Nccl
from .p2p import PeerToPeer, message_words
from .rendezvous import RemoteError, Rendezvous
from .serialization import parse_record
from .transport import SingleRank, Transport

T = TypeVar("T")
_LOOK_FOR_FAILURE = 0.1  # seconds
# seconds for the first message, however short the time-out of steps is: NCCL makes its communicator in it
_LEAST_TO_CONNECT = {"gloo": 15.0, "nccl": 60.0}


class Construction:
    """Constructs a group on this rank. ``run`` fills the attributes."""

    # as in ``TensorParallel``, or
    own: capabilities.RankCapabilities  # sizes and time-out are the same on all ranks
    first_token: int
    last_token: int
    vocab_size: int
    num_rows: int
    ranges: list[tuple[int, int]]  # every rank's tokens that can be sampled, [first, last)
    impl: str
    transport_name: str
    shard: Shard  # for kernels

    def __init__(self, group: dist.ProcessGroup | None, rendezvous: Rendezvous) -> None:
        self._group, self._rendezvous = group, rendezvous
        self.transport: Transport = SingleRank()

    def run(self, weight: Tensor, timeout: float | timedelta, options: dict[str, Any]) -> None:
        """Constructs the group. A collective call.

        Raises what ``TensorParallel`` raises, but RemoteError for an exception of another rank. The caller closes
        ``transport`` then. ``options``: the other arguments of ``TensorParallel``, by name. All are unchecked."""
        members = self._agree(weight, timeout, options)
        self.impl = capabilities.choose_impl(members)
        self.transport_name, no_p2p = capabilities.choose_transport(members, self.impl)
        if len(members) > 1:
            no_p2p = self._make_transport(self._rendezvous, members, weight.device) or no_p2p
        if no_p2p is not None:
            message = f"transport 'p2p' cannot be used ({no_p2p}); it is {self.transport_name!r} instead"
            warnings.warn(message, RuntimeWarning, stacklevel=3)
        self.shard = self.transport.shard(self.first_token)
        self._stage("the end of construction", lambda: self._compile(weight))

    def _stage(self, phase: str, work: Callable[[], T], check: Callable[[Any], T] = lambda value: value) -> list[T]:
        """Returns the result of ``work`` on all ranks, which wait for each other while they live.

        An exception of one rank reaches them all. ``check``: as of ``Rendezvous.exchange``."""
        with self._rendezvous.heartbeat():
            value = work()
        return self._rendezvous.exchange(phase, value, check)

    def _agree(
        self, weight: Tensor, timeout: float | timedelta, options: dict[str, Any]
    ) -> list[capabilities.RankCapabilities]:
        """Exchanges and checks capabilities. Returns those of all ranks, by rank."""

        def describe() -> capabilities.RankCapabilities:
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
            return capabilities.rank_capabilities(weight, parse_timeout(timeout), backends, **options)

        check = functools.partial(parse_record, capabilities.RankCapabilities)
        members = self._stage("construction", describe, check)
        rank, ranges = self._rendezvous.rank, capabilities.check(members)
        self.own = members[rank]
        self.first_token, self.last_token = ranges[rank]
        self.ranges, self.vocab_size = ranges, max(last for _, last in ranges)
        self.num_rows = sum(member.shape[0] for member in members)
        return members

    def _make_transport(
        self, rendezvous: Rendezvous, members: list[capabilities.RankCapabilities], device: torch.device
    ) -> str | None:
        """Makes ``transport``. Returns the reason why p2p cannot be used if it was tried and failed, else None."""
        why, rows, seconds = None, self.own.max_batch_size, self.own.timeout
        capacity = rows * self.own.max_num_samples  # winners
        if self.transport_name == "p2p":
            why = self._make_p2p(rendezvous, device, max(capacity, message_words(rows, rendezvous.ranks)))
            if why is None:
                return None
            if members[0].transport == "p2p":
                raise ValueError(f"transport='p2p' cannot be used ({why})")
            self.transport_name, _ = capabilities.choose_transport(members, self.impl, no_p2p=why)

        def make() -> None:
            if self.transport_name == "gloo":
                self.transport = Gloo(self._group, rendezvous, rows, capacity, seconds)
            else:
                widest = max(last - first for first, last in self.ranges)
                self.transport = Nccl(self._group, rendezvous, device, rows, capacity, widest, seconds)

        self._stage("making buffers", make)
        made: Any = self.transport
        bound = max(seconds, _LEAST_TO_CONNECT[self.transport_name])

        def connect() -> None:
            # in a thread: NCCL waits for a rank that has failed or died much longer than ``bound``
            first_message = functools.partial(made.connect, bound) if isinstance(made, Gloo) else made.connect
            connecting, until = DeviceThread(first_message, device), time.monotonic() + bound
            while not connecting.ends_within(_LOOK_FOR_FAILURE):
                if rendezvous.next_has_failed():  # the exchange that follows raises the reason
                    return
                if isinstance(made, Nccl) and time.monotonic() > until:
                    raise TimeoutError(f"NCCL did not connect the ranks within {bound:g} s")
            connecting.result()

        self._stage("connecting", connect)
        return why

    def _make_p2p(self, rendezvous: Rendezvous, device: torch.device, capacity: int) -> str | None:
        """Makes transport p2p.

        Returns None, or the reason why memory cannot be mapped (missing rights in a container, say)."""
        try:
            rows, draws = self.own.max_batch_size, self.own.max_num_samples
            self.transport = PeerToPeer(rendezvous, device, capacity, self.own.timeout, rows, draws, self.vocab_size)
            rendezvous.exchange("mapping peers' memory")
            return None
        except TensorParallelError:
            raise
        except Exception as error:
            agreed = error if isinstance(error, RemoteError) else rendezvous.fail(error)
            self.transport.close(True)
            self.transport = SingleRank()
            if not isinstance(agreed, RemoteError):
                raise agreed from error
            if agreed.kind in ("OutOfMemoryError", "MemoryError"):
                raise
            return f"rank {agreed.rank}: {agreed.message}"

    def _compile(self, weight: Tensor) -> None:
        """Compiles the kernels in a dry run, without other ranks: compiling in a step would exceed the time-out."""
        backend = BACKENDS[self.impl]
        if not weight.is_cuda or not backend.compiles:
            return
        shard = self.transport.dry_run_transport(self.first_token)
        inputs = example(weight)._replace(vocab_size=self.last_token - self.first_token, shard=shard)
        with torch.cuda.device(weight.device):
            for num_samples in sorted({1, self.own.max_num_samples}):
                plan = make_plan(backend, inputs._replace(num_samples=num_samples), self.own.max_batch_size)
                with plan.compile_together():
                    plan.draw(backend.run)
                plan.draw(backend.run)
            torch.cuda.current_stream().synchronize()


def parse_timeout(timeout: float | timedelta) -> float:
    """Returns a user's time-out in seconds. Raises TypeError for anything but a number or a timedelta."""
    if isinstance(timeout, timedelta):
        return timeout.total_seconds()
    return real("timeout", timeout, lambda _, value: float(value))
