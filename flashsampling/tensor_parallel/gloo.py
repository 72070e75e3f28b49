"""Transport ``gloo``: winners go through the host, point to point. On CPUs, or where nothing else works.

Point to point rather than all-gather, so that a rank that is gone has a name. A failure is decided in the process group's
store. A step looks there first, which costs a round trip; who is in one gets a message from each rank that has given up, which
says so, and does not wait for ``timeout``, after which gloo closes connections for good.

    all messages of a step together   wait for the others no longer than ``timeout``
    an exception while messages wait  a signal's handler, say: the messages are kept, the group has failed, this rank is named
    connections that are closed       whoever closed them says in the store whose fault it is; no new group is made over them
    a destroyed process group         the group has failed, the rank that destroyed it is named
"""

import contextlib
import time
import weakref
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .. import exchange_protocol
from ..exchange_protocol import Shard
from ..inputs import DraftChains, SampleInputs
from ..sampling_params import DEFAULT_PARAMS, RANK_LOCAL_FIELDS
from .failures import Failure, TensorParallelError, left
from .message import FAILED, HASHED, HEADER, STEP, Hashes, difference
from .rendezvous import Rendezvous

_FIRST_TAG = 0x46530000  # far from 0, torch's default, by which a user's own send would meet a step: gloo then aborts
_LEAST_WAIT = 1e-3  # seconds; gloo counts milliseconds, and 0 of them are no bound at all
_EARLY = 0.01  # seconds, by which a time-out may come before it is due: gloo cuts off what is less than a millisecond
_ITS_REASON = 2.0  # seconds in which a rank that closed a connection says why
_LOOK_AGAIN = 0.02  # seconds between two looks for that
_ANEW = "make a new process group (torch.distributed.new_group)"


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
        self,
        group: dist.ProcessGroup | None,
        rendezvous: Rendezvous,
        max_batch_size: int,
        capacity: int,
        seconds: float,
    ) -> None:
        self.skipped_calls = 0
        self._rendezvous, self._seconds = rendezvous, seconds
        self._rank, self._ranks = rendezvous.rank, rendezvous.ranks
        self._tag = _FIRST_TAG + rendezvous.number % 2**16
        self._hashes = Hashes(max_batch_size, torch.device("cpu"))
        self.room = capacity
        self._header = torch.zeros(HEADER, dtype=torch.int64, device="cpu")
        self._steps = 0
        self._left = seconds  # that the messages of a step may still wait for
        self._begun = False  # whether one of a step has gone out
        self._failure: Failure | None = None
        self._gave_up = False
        # the object, not the default group of the moment: it may be destroyed, and another made, while this group is open
        self._connections: Any = group or dist.group.WORLD

    def closed(self) -> Failure | None:
        """Why the process group's connections are closed, if a step of this process found that out."""
        failure = _closed.get(self._connections)
        if failure is None:
            return None
        why = "late there" if failure.kind == "late" else "at fault there"
        what = f"gloo closed the process group's connections after a step before, as this rank was {why}: {_ANEW}"
        return Failure("left", failure.rank, what=what)

    def connect(self, bound: float) -> None:
        """A first message, waited for as many seconds. Where the process group's connections are closed none arrives.

        Raises:
            TensorParallelError: they are; or a rank did not take part.
        """
        mine = torch.zeros(HEADER + self.room, dtype=torch.int64, device="cpu")
        began = time.monotonic()
        peer = self._exchange(mine, torch.empty(self._ranks, len(mine), dtype=torch.int64, device="cpu"), began + bound)
        if peer is not None and time.monotonic() - began < bound - _EARLY:
            what = f"its process group's connection to {self._rendezvous.who(peer)} is closed: {_ANEW}"
            raise self._error(Failure("left", self._rank, what=what))
        if peer is not None:
            raise self._error(Failure("late", peer, what="connecting"))

    def _error(self, failure: Failure) -> TensorParallelError:
        return failure.error(self._rendezvous.who(failure.rank), self._seconds)

    def shard(self, first_token: int) -> Shard:
        """As the protocol says."""
        return Shard(first_token, exchange_protocol.PACKED)

    dry_run_transport = shard

    def compare(self, step: SampleInputs) -> None:
        """As the protocol says: the message says all."""

    def finish(self, out: Tensor, step: SampleInputs) -> Tensor:
        """As the protocol says. Raises the failure of this step on the host; the rank that is named raises it too."""
        try:
            self.begin(step)
            tokens = exchange_protocol.tokens_of(self._gathered_words(out.cpu())).to(out.device)
        except BaseException as error:
            self.end(error)
            raise
        if (
            step.params is not DEFAULT_PARAMS or step.draft_hash is not None
        ):  # the next step's message says nothing of this one
            self.end()
        return tokens

    def begin(self, step: SampleInputs) -> None:
        """As the protocol says."""
        self._left, self._begun = self._seconds, False
        rows: dict[str, Any] = {name: _on_host(getattr(step, name)) for name in HASHED}
        if step.params is not DEFAULT_PARAMS:
            params = {
                name: _on_host(getattr(step.params, name))
                for name in step.params.names()
                if name not in RANK_LOCAL_FIELDS
            }
            rows["params"] = step.params._replace(**params)
        if step.drafted is not None:
            rows["drafted"] = DraftChains(*map(_on_host, step.drafted))
        rows["draft_hash"] = _on_host(step.draft_hash)
        self._hashes.write(self._header, step._replace(**rows))

    def all_gather(self, words: Tensor, step: SampleInputs, wanted: Tensor | None = None) -> Tensor:
        """As the protocol says: raises."""
        return self._gathered_words(words.cpu()).to(words.device)

    def end(self, error: BaseException | None = None) -> None:
        """As the protocol says. An exception behind a message: the others have this rank's, or wait for its next."""
        self._hashes.clear(self._header)
        if error is not None and self._begun:
            self._abandon(error, self._steps + self.skipped_calls - 1)

    def _gathered_words(self, words: Tensor) -> Tensor:
        mine = torch.zeros(HEADER + self.room, dtype=torch.int64, device="cpu")
        mine[:HEADER] = self._header
        number, self._steps = self._steps + self.skipped_calls, self._steps + 1
        mine[STEP] = number
        mine[HEADER : HEADER + len(words)] = words
        messages = torch.empty(self._ranks, len(mine), dtype=torch.int64, device="cpu")
        messages[self._rank] = mine
        failure = self._all_gather(mine, messages, number) or difference(messages[:, :HEADER].tolist())
        if failure is not None:
            failure = self.declare(failure)
            if failure.kind == "left":
                self.drain()  # others may wait for this rank, which has sent nothing
            raise self._error(failure)
        return messages[:, HEADER : HEADER + len(words)]

    def _all_gather(self, mine: Tensor, messages: Tensor, step: int) -> Failure | None:
        """One message to and from each rank. The failure of this step; an exception is one too."""
        began = time.monotonic()
        before = _closed.get(self._connections)
        if before is not None:  # by a step of another group
            return replace(before, step=step)
        try:
            peer = None if self._is_destroyed() else self._exchange(mine, messages, began + self._left)
            waited = time.monotonic() - began
            in_time, self._left = waited < self._left - _EARLY, self._left - waited
            self._begun = True
            if self._is_destroyed():
                return Failure("left", self._rank, step, what="its process group has been destroyed")
            if peer is None:
                return None
            failure = self.declare((self._said_by_others() if in_time else None) or Failure("late", peer, step))
            _closed[self._connections] = failure
            return failure
        except BaseException as error:
            self._abandon(error, step)
            raise

    def _exchange(self, mine: Tensor, messages: Tensor, until: float) -> int | None:
        """The rank whose message does not arrive, or that does not take this one; None if all did. Messages are kept if not all
        did: gloo drops one that nobody holds, and its peer then waits for it."""
        others = [rank for rank in range(self._ranks) if rank != self._rank]
        works: list[Any] = []
        _kept[id(works)] = mine, messages, works
        # no Python code runs between a message and its place in the list, so no signal's handler raises there
        send, receive = self._connections.send, self._connections.recv
        waiting_for = others[0]
        try:
            for waiting_for in others:
                works.extend(map(receive, [[messages[waiting_for]]], [waiting_for], [self._tag]))
            for waiting_for in others:
                works.extend(map(send, [[mine]], [waiting_for], [self._tag]))
            for waiting_for, work in zip(others + others, works):  # noqa: B007 (the handler reads it)
                work.wait(timedelta(seconds=max(until - time.monotonic(), _LEAST_WAIT)))
        except RuntimeError:  # gloo's for a time-out and for a lost connection
            return waiting_for
        del _kept[id(works)]
        return None

    def _said_by_others(self) -> Failure | None:
        """The failure of the group that whoever closed a connection declares about now; or None: its process is gone."""
        until = time.monotonic() + min(_ITS_REASON, self._seconds)
        while (known := self._rendezvous.known()) is None and time.monotonic() < until:
            time.sleep(_LOOK_AGAIN)
        return known

    def _is_destroyed(self) -> bool:
        try:
            dist.get_process_group_ranks(self._connections)
        except (KeyError, ValueError):
            return True
        return False

    def _abandon(self, error: BaseException, step: int) -> None:
        """This rank takes no further part: the others may have its message, or wait for the next of this step."""
        if not isinstance(error, TensorParallelError):
            self.declare(replace(left(self._rank, error), step=step))
            self.drain()

    def failure(self) -> Failure | None:
        """As the protocol says: the store is asked."""
        if self._failure is None:
            self._failure = (
                self._rendezvous.known()
            )  # None if its process is gone; the next step finds out, if it is a rank
        return self._failure

    def declare(self, failure: Failure) -> Failure:
        """As the protocol says."""
        if self._failure is None:
            self._failure = self._rendezvous.declare(failure)
        return self._failure

    def drain(self) -> None:
        """As the protocol says: whoever is in a step gets a message that the group has failed, and is rid of its own."""
        if self._failure is None or self._gave_up:
            return
        self._gave_up = True
        mine = torch.zeros(HEADER + self.room, dtype=torch.int64, device="cpu")
        mine[FAILED] = 1
        send, receive = self._connections.send, self._connections.recv
        for rank in range(self._ranks):
            if rank != self._rank:
                theirs, works = torch.empty_like(mine), list[Any]()
                _kept[id(works)] = mine, theirs, works
                for transfer, message in ((send, mine), (receive, theirs)):
                    with contextlib.suppress(RuntimeError):  # a connection that is lost
                        works.extend(map(transfer, [[message]], [rank], [self._tag]))

    def close(self, everybody: bool) -> None:
        """As the protocol says: nothing here is touched by others."""


_kept: dict[int, Any] = {}  # messages on their way: who is in no step takes and sends none until it hears of a failure
_closed: weakref.WeakKeyDictionary[dist.ProcessGroup, Failure] = weakref.WeakKeyDictionary()  # why connections are


def _on_host(value: Any) -> Any:
    return value.cpu() if isinstance(value, Tensor) else value
