"""Transport ``gloo``: winners go through the host, point to point. On CPUs, or where nothing else works.

Point to point rather than all-gather, so that a rank that is gone has a name. A failure is decided in the process group's
store. A step looks there first, which costs a round trip; who is in one gets a message from each rank that has given up, which
says so, and does not wait for ``timeout``, after which gloo closes connections for good.
"""

import contextlib
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .. import exchange
from ..exchange import Shard
from ..step import PLAIN, Drafted, Step
from .failure import Failure
from .message import FAILED, GIVEN, HASHED, HEADER, STEP, Hashes, difference
from .rendezvous import Rendezvous
from .sharding import global_rank

_FIRST_TAG = 0x46530000  # far from 0, torch's default, by which a user's own send would meet a step: gloo then aborts
_LEAST_WAIT = 1e-3  # seconds; gloo counts milliseconds, and 0 of them are no bound at all


class Gloo:
    """See ``transport.Transport``.

    Args:
        group: the process group, None for the default one.
        rendezvous: of the group's construction.
        max_batch_size: rows, at most.
        capacity: winners of a step, at most.
        seconds: how long another rank is waited for.
    """

    name = "gloo"
    skips = False

    def __init__(
        self, group: dist.ProcessGroup | None, rendezvous: Rendezvous, max_batch_size: int, capacity: int, seconds: float
    ) -> None:
        self.left_out = 0
        self._group, self._rendezvous, self._seconds = group, rendezvous, seconds
        self._rank, self._ranks = rendezvous.rank, rendezvous.ranks
        self._tag = _FIRST_TAG + rendezvous.number % 2**16
        self._hashes = Hashes(max_batch_size, torch.device("cpu"))
        self.room = capacity
        self._header = torch.zeros(HEADER, dtype=torch.int64, device="cpu")
        self._steps = 0
        self._failure: Failure | None = None
        self._gave_up = False

    def shard(self, first_token: int) -> Shard:
        """As the protocol says."""
        return Shard(first_token, exchange.PACKED)

    rehearsal = shard

    def compare(self, step: Step) -> None:
        """As the protocol says: the message says all."""

    def finish(self, out: Tensor, step: Step) -> Tensor:
        """As the protocol says. Raises the failure of this step on the host; the rank that is named raises it too."""
        try:
            self.begin(step)
            messages = self._swapped(out.cpu())
        finally:  # the next step's message says nothing of this one
            if step.asked is not PLAIN or step.alike is not None:
                self._hashes.clear(self._header)
        return exchange.tokens_of(messages).to(out.device)

    def begin(self, step: Step) -> None:
        """As the protocol says."""
        rows: dict[str, Any] = {name: _on_host(getattr(step, name)) for name in HASHED}
        if step.asked is not PLAIN:
            asked = {name: _on_host(getattr(step.asked, name)) for name in step.asked.names() if name not in GIVEN}
            rows["asked"] = step.asked._replace(**asked)
        if step.drafted is not None:
            rows["drafted"] = Drafted(*map(_on_host, step.drafted))
        rows["alike"] = _on_host(step.alike)
        self._hashes.write(self._header, step._replace(**rows))

    def swap(self, words: Tensor, step: Step, wanted: Tensor | None = None) -> Tensor:
        """As the protocol says: raises."""
        return self._swapped(words.cpu()).to(words.device)

    def end(self) -> None:
        """As the protocol says."""
        self._hashes.clear(self._header)

    def _swapped(self, words: Tensor) -> Tensor:
        mine = torch.zeros(HEADER + self.room, dtype=torch.int64, device="cpu")
        mine[:HEADER] = self._header
        number, self._steps = self._steps + self.left_out, self._steps + 1
        mine[STEP] = number
        mine[HEADER : HEADER + len(words)] = words
        messages = torch.empty(self._ranks, len(mine), dtype=torch.int64, device="cpu")
        messages[self._rank] = mine
        failure = self._swap(mine, messages, number) or difference(messages[:, :HEADER].tolist())
        if failure is not None:
            failure = self.declare(failure)
            raise failure.error(self._rendezvous.who(failure.rank), self._seconds)
        return messages[:, HEADER : HEADER + len(words)]

    def _swap(self, mine: Tensor, messages: Tensor, step: int) -> Failure | None:
        others = [rank for rank in range(self._ranks) if rank != self._rank]
        until = time.monotonic() + self._seconds
        waiting_for = others[0]
        sends, receipts = [], []
        try:
            for waiting_for in others:
                to = global_rank(self._group, waiting_for)
                sends.append(dist.isend(mine, to, group=self._group, tag=self._tag))
            for waiting_for in others:
                source = global_rank(self._group, waiting_for)
                receipts.append(dist.irecv(messages[waiting_for], source, group=self._group, tag=self._tag))
            for waiting_for, work in zip(others + others, receipts + sends):  # noqa: B007 (the handler reads it)
                assert work is not None
                work.wait(timedelta(seconds=max(until - time.monotonic(), _LEAST_WAIT)))
        except RuntimeError:  # gloo's for a time-out and for a lost connection
            return Failure("late", waiting_for, step)
        return None

    def failure(self) -> Failure | None:
        """As the protocol says: the store is asked."""
        if self._failure is None:
            self._failure = self._rendezvous.known()  # None if its process is gone; the next step finds out, if it is a rank
        return self._failure

    def declare(self, failure: Failure) -> Failure:
        """As the protocol says."""
        if self._failure is None:
            self._failure = self._rendezvous.declare(failure)
        return self._failure

    def catch_up(self) -> None:
        """As the protocol says: whoever is in a step gets a message that the group has failed, and is rid of its own."""
        if self._failure is None or self._gave_up:
            return
        self._gave_up = True
        mine = torch.zeros(HEADER + self.room, dtype=torch.int64, device="cpu")
        mine[FAILED] = 1
        for rank in range(self._ranks):
            if rank != self._rank:
                with contextlib.suppress(RuntimeError, ValueError):  # a connection that is lost; a group that is destroyed
                    other = global_rank(self._group, rank)
                    _kept.append(dist.isend(mine, other, group=self._group, tag=self._tag))
                    _kept.append(dist.irecv(torch.empty_like(mine), other, group=self._group, tag=self._tag))

    def close(self, everybody: bool) -> None:
        """As the protocol says: nothing here is touched by others."""


_kept: list[Any] = []  # messages of ranks that gave up: who is in no step takes and sends none until it hears of it


def _on_host(value: Any) -> Any:
    return value.cpu() if isinstance(value, Tensor) else value
