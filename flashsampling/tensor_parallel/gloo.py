"""Transport ``gloo``: winners go through the host, point to point. For CPUs, or where no other transport works.

Messages are point to point, because an all-gather could not name a rank that is gone. A failure is decided in the
process group's store, which every step reads first, at the cost of a round trip. A rank that gives up also sends a
message to each peer in a step, so that the peer does not wait until ``timeout``, when gloo closes connections for good.

    logits of filtered rows           messages of ``LOGIT_WORDS`` with a tag of their own, after one that compares
    messages of one step              wait for the peers no longer than ``timeout`` together
    an exception while messages wait  (a signal handler's) messages are kept, the group fails and names this rank
    connections that are closed       the rank that closed them posts the failure in the store; no group uses them again
    a destroyed process group         the group fails and names the rank that destroyed it
"""

import contextlib
import time
import weakref
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..exchange_protocol import tokens_of
from ..inputs import DraftChains, SampleInputs
from ..sampling_params import RANK_LOCAL_FIELDS
from .failures import Failure, TensorParallelError, abort_failure
from .message import FAILED, HASHED, HEADER, STEP, Hashes, difference
from .rendezvous import Rendezvous
from .transport import Transport

_FIRST_TAG = 0x46530000  # not torch's default, 0: a user's own send would meet a step, and gloo would abort
LOGIT_WORDS = 1 << 16  # int64, two logits each
_LEAST_WAIT = 1e-3  # seconds; gloo counts milliseconds and takes 0 for no bound
_EARLY = 0.01  # seconds by which a time-out may come early, because gloo rounds down to milliseconds
_REASON_WAIT = 2.0  # seconds in which a rank that closed a connection posts its reason
_LOOK_AGAIN = 0.02  # seconds between two looks for the reason
_NEW_GROUP = "make a new process group (torch.distributed.new_group)"


class Gloo(Transport):
    """Carries winners by point-to-point messages."""

    def __init__(
        self,
        group: dist.ProcessGroup | None,  # None: the default one
        rendezvous: Rendezvous,
        max_batch_size: int,
        capacity: int,  # the most winners of a step
        seconds: float,  # how long to wait for a peer
    ) -> None:
        self._rendezvous, self._seconds = rendezvous, seconds
        self._rank, self._ranks = rendezvous.rank, rendezvous.ranks
        self._tag = _FIRST_TAG + rendezvous.number % 2**16 * 2  # messages; then those with logits
        self._hashes = Hashes(max_batch_size, torch.device("cpu"))
        self.room = self._message_room = capacity
        self._lane = 0  # 1: messages with logits
        self._steps = self._skipped_calls = 0
        self._time_left = seconds  # for the remaining messages of a step
        self._sent = False  # whether a message of the step has been sent
        self._failure: Failure | None = None
        self._drained = False
        # keep the object: the default group may be destroyed and made anew while this group is open
        self._connections: Any = group or dist.group.WORLD

    def connect(self, bound: float) -> None:
        """Exchanges a first message within ``bound`` seconds, to find closed connections.

        Raises:
            TensorParallelError: the process group's connections are closed, or a rank did not take part.
        """
        message = torch.zeros(HEADER + self._message_room, dtype=torch.int64, device="cpu")
        began = time.monotonic()
        peer = self._exchange(message, message.new_empty(self._ranks, len(message)), began + bound)
        if peer is not None and time.monotonic() - began < bound - _EARLY:
            what = f"its process group's connection to {self._rendezvous.who(peer)} is closed: {_NEW_GROUP}"
            raise self._rendezvous.error(Failure("aborted", self._rank, what=what))
        if peer is not None:
            raise self._rendezvous.error(Failure("timeout", peer, what="connecting"))

    def set_skipped_calls(self, count: int) -> None:
        """Implements ``Transport.set_skipped_calls``."""
        self._skipped_calls = count

    def finish(self, out: Tensor, step: SampleInputs) -> Tensor:
        """Implements ``Transport.finish``. Raises the failure of this step on all ranks."""
        try:
            self.begin(step)
            return tokens_of(self.all_gather(out, step))
        except BaseException as error:
            self.end(error)
            raise

    def begin(self, step: SampleInputs) -> None:
        """Implements ``Collectives.begin``."""
        self._time_left, self._sent = self._seconds, False
        rows: dict[str, Any] = {name: _on_host(getattr(step, name)) for name in (*HASHED, "draft_hash")}
        params = {
            name: _on_host(getattr(step.params, name)) for name in step.params.names() if name not in RANK_LOCAL_FIELDS
        }
        if params:
            rows["params"] = step.params._replace(**params)
        if step.drafted is not None:
            rows["drafted"] = DraftChains(*map(_on_host, step.drafted))
        self._header = torch.zeros(HEADER, dtype=torch.int64, device="cpu")
        self._hashes.write(self._header, step._replace(**rows))

    def all_gather(self, words: Tensor, step: SampleInputs) -> Tensor:
        """Implements ``Collectives.all_gather``. Raises the failure of the step."""
        message = torch.zeros(HEADER + self.room, dtype=torch.int64, device="cpu")
        message[:HEADER] = self._header
        number, self._steps = self._steps + self._skipped_calls, self._steps + 1
        message[STEP] = number
        message[HEADER : HEADER + len(words)] = words
        messages = torch.empty(self._ranks, len(message), dtype=torch.int64, device="cpu")
        messages[self._rank] = message
        failure = self._all_gather(message, messages, number) or difference(messages[:, :HEADER].tolist())
        if failure is not None:
            failure = self.declare(failure)
            if failure.kind == "aborted":
                self.drain()  # peers may wait for this rank, which has sent nothing
            raise self._rendezvous.error(failure)
        return messages[:, HEADER : HEADER + len(words)].to(words.device)

    def gather_logits(
        self, logits: Tensor, bias: Tensor | None, ranges: Sequence[tuple[int, int]], step: SampleInputs
    ) -> Tensor:
        """Implements ``Collectives.gather_logits``. The first message compares: a rank at another step sends no logits.

        All messages of a tag have one size, because gloo aborts if sizes differ."""
        self.all_gather(torch.zeros(1, dtype=torch.int64, device="cpu"), step)
        self.room, self._lane = LOGIT_WORDS, 1
        try:
            return super().gather_logits(logits, bias, ranges, step)
        finally:
            self.room, self._lane = self._message_room, 0

    def end(self, error: BaseException | None = None) -> None:
        """Implements ``Collectives.end``.

        If ``error`` comes after a message, the group fails: peers wait for the next one."""
        if error is not None and self._sent:
            self._abort(error, self._steps + self._skipped_calls - 1)

    def _all_gather(self, message: Tensor, messages: Tensor, step: int) -> Failure | None:
        """Exchanges the message with all peers.

        Returns the failure of this step, if any; an exception is a failure too."""
        began = time.monotonic()
        before = _closed.get(self._connections)
        if before is not None:  # a step of another group closed the connections
            return replace(before, step=step)
        try:
            peer = None if self._is_destroyed() else self._exchange(message, messages, began + self._time_left)
            waited = time.monotonic() - began
            in_time, self._time_left = waited < self._time_left - _EARLY, self._time_left - waited
            self._sent = True
            if self._is_destroyed():
                return Failure("aborted", self._rank, step, what="its process group has been destroyed")
            if peer is None:
                return None
            failure = self.declare((self._wait_for_reason() if in_time else None) or Failure("timeout", peer, step))
            _closed[self._connections] = failure
            return failure
        except BaseException as error:
            self._abort(error, step)
            raise

    def _exchange(self, message: Tensor, messages: Tensor, until: float) -> int | None:
        """Sends the message to all peers and receives theirs. Returns the first peer with which this fails, or None.

        After a failure messages are kept: gloo drops a message that is not referenced, and its peer would wait for
        it."""
        others = [rank for rank in range(self._ranks) if rank != self._rank]
        works: list[Any] = []
        _kept[id(works)] = message, messages, works
        # ``map`` and ``extend`` run in C, so no signal handler runs between sending a message and keeping its work
        send, receive = self._connections.send, self._connections.recv
        waiting_for = others[0]
        try:
            tag = self._tag + self._lane
            for waiting_for in others:
                works.extend(map(receive, [[messages[waiting_for]]], [waiting_for], [tag]))
            for waiting_for in others:
                works.extend(map(send, [[message]], [waiting_for], [tag]))
            for waiting_for, work in zip(others + others, works):  # noqa: B007 (the handler reads it)
                work.wait(timedelta(seconds=max(until - time.monotonic(), _LEAST_WAIT)))
        except RuntimeError:  # gloo's for a time-out and for a lost connection
            return waiting_for
        del _kept[id(works)]
        return None

    def _wait_for_reason(self) -> Failure | None:
        """Waits for the failure that the rank that closed a connection declares.

        Returns None if that process is gone."""
        until = time.monotonic() + min(_REASON_WAIT, self._seconds)
        while (known := self._rendezvous.try_declared()) is None and time.monotonic() < until:
            time.sleep(_LOOK_AGAIN)
        return known

    def _is_destroyed(self) -> bool:
        try:
            dist.get_process_group_ranks(self._connections)
        except (KeyError, ValueError):
            return True
        return False

    def _abort(self, error: BaseException, step: int) -> None:
        """Makes the group fail: peers may have this rank's message, or wait for its next one."""
        if not isinstance(error, TensorParallelError):
            self.declare(replace(abort_failure(self._rank, error), step=step))
            self.drain()

    def failure(self) -> Failure | None:
        """Implements ``Transport.failure``: reads the store."""
        if self._failure is None:
            self._failure = self._rendezvous.try_declared()  # None if the store is gone, which the next step notices
        return self._failure

    def declare(self, failure: Failure) -> Failure:
        """Implements ``Transport.declare``."""
        if self._failure is None:
            self._failure = self._rendezvous.declare(failure)
        return self._failure

    def drain(self) -> None:
        """Implements ``Transport.drain``: tells peers in a step that the group has failed, and takes their messages."""
        if self._failure is None or self._drained:
            return
        self._drained = True
        send, receive = self._connections.send, self._connections.recv
        for tag, room in ((self._tag, self._message_room), (self._tag + 1, LOGIT_WORDS)):
            own = torch.zeros(HEADER + room, dtype=torch.int64, device="cpu")
            own[FAILED] = 1
            for rank in range(self._ranks):
                if rank != self._rank:
                    received, works = torch.empty_like(own), list[Any]()
                    _kept[id(works)] = own, received, works
                    for transfer, message in ((send, own), (receive, received)):
                        with contextlib.suppress(RuntimeError):  # a lost connection
                            works.extend(map(transfer, [[message]], [rank], [tag]))


_kept: dict[int, Any] = {}  # messages in flight: a peer outside of a step takes them when it learns of a failure
# process groups whose connections are closed -> the failure that closed them
_closed: weakref.WeakKeyDictionary[dist.ProcessGroup, Failure] = weakref.WeakKeyDictionary()


def _on_host(value: Any) -> Any:
    return value.cpu() if isinstance(value, Tensor) else value
