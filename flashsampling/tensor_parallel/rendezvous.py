"""Collective calls over a process group's store that end within a bound, even if ranks fail.

A process group's own collectives wait for its time-out, 10 to 30 minutes, and are undefined once a rank has left them.
Here every exchange has a number. Each rank posts its payload, or an error, under that number and polls for the payloads
of its peers. One key, the verdict, says how the exchange ended. The first rank that knows sets it by ``compare_set``,
and all follow:

    event                             set by                             result
    all payloads are there            a rank that has seen them all      the payloads
    a rank posted an error            the first rank that sees it        all raise it, with the rank's name
    a rank does not come              the first rank that times out      all raise its name, and so does the late rank
    ranks are in different calls      a rank that has seen all           all raise a mismatch
    the group failed meanwhile        the first rank that knows          all raise that failure

No rank therefore takes part in an exchange that another has given up, and all ranks have the same number afterwards.
The next group has a key prefix of its own and works.

The store has no authentication. Values read from it are checked (``decode``), and a value that no rank writes ends in a
TensorParallelError.

A rank that works between two exchanges (compiling, for example) posts heartbeats, and its peers wait for it
(``heartbeat``).
"""

import contextlib
import json
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, TypeVar

from torch.distributed import Store

from .failures import Failure, TensorParallelError
from .serialization import MalformedError, from_json
from .store import BoundedStore, StoreGoneError

T = TypeVar("T")
_POLL_AT_FIRST, _POLL_AT_MOST = 2e-4, 2e-2  # seconds between two looks
_LINGER = 2.0  # seconds


class RemoteError(RuntimeError):
    """Rank ``rank`` could not take part in an exchange, for an exception of class ``kind``. All other ranks raise
    it."""

    def __init__(self, rank: int, kind: str, message: str) -> None:
        super().__init__(f"rank {rank}: {kind}: {message}")
        self.rank, self.kind, self.message = rank, kind, message


class Rendezvous:
    """The exchanges of one group, from its construction until it is closed.

    Attributes:
        number: how many groups this rank has begun to make over this store before. The store counts them by rank,
            before anything can fail, so that ranks agree on it after failures and after a process is replaced.

    Raises:
        TensorParallelError: the store is gone.
    """

    def __init__(
        self,
        connect: Callable[[], Store],  # ``store.open_store``
        rank: int,
        ranks: int,
        seconds: float,  # the time-out for a rank without a heartbeat
        who: Callable[[int], str] = "rank {}".format,  # a rank's name for messages
        store_host: int = 0,  # the rank whose process probably holds the store; it is named when the store is gone
    ) -> None:
        self.rank, self.ranks, self.seconds, self.who, self._store_host = rank, ranks, seconds, who, store_host
        self.store = BoundedStore(connect, seconds)
        try:
            with self._store_errors():
                key = f"groups/{rank}"  # not ``add``: on a value that is no number it closes the connection
                value = self.store.get(key)
                self.number = 0 if value is None else self.decode(key, _parse_count, value)
                self.store.set(key, str(self.number + 1).encode())
        except TensorParallelError:
            self.store.end()
            raise
        self.store.prefix = f"{self.number}/"
        self._exchanges = 0
        self._users, self._lock = 1, threading.Lock()

    def exchange(
        self,
        phase: str,
        payload: bytes,
        failure: Callable[[], Failure | None] = lambda: None,
        excused: Callable[[], Collection[int]] | None = None,
    ) -> list[bytes | None]:
        """Returns the payloads of all ranks; None for excused ranks that did not come.

        Args:
            phase: name of the call; ranks must agree on it.
            payload: this rank's payload.
            failure: returns a failure of the group, which ends the exchange; it is polled.
            excused: returns the ranks that need not come; it is polled. None: all must come.

        Raises:
            RemoteError: a rank had an error instead of a payload.
            TensorParallelError: a rank did not come, was in another exchange, or the group failed.
        """
        number, self._exchanges = self._exchanges, self._exchanges + 1
        with self._store_errors():
            self.store.set(f"{number}/{self.rank}", _pack_payload(phase, False, payload))
            seen = {self.rank: payload}
            verdict = self._wait(number, phase, seen, failure, excused or tuple)
            error = self._error_of(verdict)
            if error is not None:
                raise error
            if excused is None and len(verdict["present"]) < self.ranks:
                raise self._malformed(f"{number}/verdict", "it ended well without all ranks")
            for rank in verdict["present"]:
                if rank not in seen:
                    key = f"{number}/{rank}"
                    seen[rank] = self.decode(key, _unpack_payload, self.store.get(key) or b"")[2]
            if len(verdict["present"]) == self.ranks and number:
                # all ranks are here, so all have read the exchange before
                self.store.delete(f"{number - 1}/{self.rank}")
                if self.rank == 0:
                    self.store.delete(f"{number - 1}/verdict")
        return [seen[rank] if rank in verdict["present"] else None for rank in range(self.ranks)]

    def fail(self, phase: str, error: BaseException) -> RemoteError | TensorParallelError:
        """Takes part in the next exchange with an error, which ends it for all ranks at once.

        Returns:
            The exception that all other ranks raise: for this error, or for an earlier one that had ended the exchange.
        """
        number, self._exchanges = self._exchanges, self._exchanges + 1
        verdict: dict[str, Any] = {"error": [self.rank, type(error).__name__, str(error)]}
        if isinstance(error, TensorParallelError):  # all ranks raise the same
            verdict = {"failure": error.failure.encoded()}
        try:
            with self._store_errors():
                self.store.set(f"{number}/{self.rank}", _pack_payload(phase, True, json.dumps(verdict).encode()))
                agreed = self._error_of(self._decide(number, verdict))
        except TensorParallelError as gone:
            return gone
        return agreed or self._malformed(f"{number}/verdict", "it ended well without this rank")

    def next_has_ended(self) -> bool:
        """Returns whether the next exchange has already ended, because another rank has an error."""
        return self.store.get(f"{self._exchanges}/verdict") is not None

    def leave(self, phase: str) -> None:
        """Takes part in the next two exchanges without waiting, for a rank that leaves the group. Never raises.

        Two, because a peer may be in another call at the moment and close in the one after it."""
        first, self._exchanges = self._exchanges, self._exchanges + 2
        with contextlib.suppress(StoreGoneError):
            for number in (first, first + 1):
                self.store.set(f"{number}/{self.rank}", _pack_payload(phase, False, b""))
            self.store.add("parted", 1)

    @contextlib.contextmanager
    def heartbeat(self, phase: str | None = None) -> Iterator[None]:
        """Posts heartbeats while the block runs: peers wait for this rank as long as its process lives.

        If ``phase`` names the next exchange, an exception in the block ends it for all ranks."""
        ended = threading.Event()

        def beat() -> None:
            count = 0
            with contextlib.suppress(StoreGoneError):
                while not ended.is_set():
                    count += 1
                    self.store.set(f"heartbeat/{self.rank}", str(count).encode())
                    ended.wait(min(self.seconds / 4, 1.0))

        thread = threading.Thread(target=beat, name="flashsampling heartbeat", daemon=True)
        thread.start()
        try:
            yield
        except Exception as error:
            if phase is not None:
                agreed = self.fail(phase, error)
                if isinstance(error, TensorParallelError):  # all ranks raise the same
                    raise agreed from error
            raise
        finally:
            ended.set()
            thread.join()

    def declare(self, failure: Failure) -> Failure:
        """Declares a failure for all ranks. Returns the one that was declared first. Never raises."""
        try:
            return self.decode_failure("failure", self.store.decide("failure", failure.encoded()))
        except StoreGoneError:
            return failure
        except TensorParallelError as error:
            return error.failure

    def declared(self) -> Failure | None:
        """Returns the declared failure, or None. Raises StoreGoneError if the store does not answer.

        A value that no rank writes is a failure of this rank."""
        text = self.store.get("failure")
        try:
            return None if text is None else self.decode_failure("failure", text)
        except TensorParallelError as error:
            return error.failure

    def try_declared(self) -> Failure | None:
        """Returns ``declared()``, or None if the store does not answer."""
        with contextlib.suppress(StoreGoneError):
            return self.declared()
        return None

    def finish(self, present: int) -> None:
        """Ends the last exchange, which ``present`` ranks took part in.

        The store host's process may end now, and the store with it, so it waits until the others have read the
        verdict."""
        with contextlib.suppress(StoreGoneError):
            parted = self.store.add("parted", 1)
            until = time.monotonic() + _LINGER
            while self.rank == self._store_host and parted < present and time.monotonic() < until:
                time.sleep(_POLL_AT_FIRST)
                parted = self.store.add("parted", 0)

    def decode_payloads(self, decode: Callable[[bytes], T], phase: str, payloads: Sequence[bytes]) -> list[T]:
        """Decodes the payloads of all ranks. Raises TensorParallelError for a payload that no rank writes."""
        return [self.decode(f"{phase} of {self.who(rank)}", decode, payload) for rank, payload in enumerate(payloads)]

    def decode(self, key: str, decode: Callable[[Any], T], value: bytes | str) -> T:
        """Decodes a value of the store. Raises TensorParallelError where ``decode`` raises a MalformedError."""
        try:
            return decode(value)
        except MalformedError as error:
            raise self._malformed(key, str(error)) from error

    def _malformed(self, key: str, why: str) -> TensorParallelError:
        """Returns the error of this rank, which gives up: it cannot know which process wrote the value."""
        what = f"the process group's store holds what no rank wrote ({key}: {why}); who can write there: SECURITY.md"
        failure = Failure("aborted", self.rank, what=what)
        return TensorParallelError(failure.message(self.who(self.rank), self.seconds), failure)

    def decode_failure(self, key: str, text: bytes | str) -> Failure:
        """Decodes a failure of the store. Raises TensorParallelError for anything else."""
        return self.decode(key, self._parse_failure, text)

    def _parse_failure(self, text: bytes | str) -> Failure:
        failure = Failure.decoded(text)
        if not 0 <= failure.rank < self.ranks:
            raise MalformedError(f"there is no rank {failure.rank}")
        return failure

    def share(self) -> None:
        """Adds a user of the store. Each user calls ``end`` once."""
        with self._lock:
            self._users += 1

    def end(self) -> None:
        """Removes a user of the store. The store's thread ends with the last one."""
        with self._lock:
            self._users -= 1
            last = self._users == 0
        if last:
            self.store.end()

    def _wait(
        self,
        number: int,
        phase: str,
        seen: dict[int, bytes],
        failure: Callable[[], Failure | None],
        excused: Callable[[], Collection[int]],
    ) -> dict[str, Any]:
        now = time.monotonic()
        alive = dict.fromkeys(range(self.ranks), now)  # time of the last heartbeat
        beats: dict[int, bytes | None] = {}
        phases = {self.rank: phase}
        unserved = self.store.seconds  # extra seconds that the store may take to answer
        looked, pause = -math.inf, _POLL_AT_FIRST  # the first look only records old heartbeats
        while True:
            began = time.monotonic()
            key = f"{number}/verdict"
            verdict = self.store.get(key)
            if verdict is not None:
                return self.decode(key, self._verdict, verdict)
            for rank in [rank for rank in range(self.ranks) if rank not in seen]:
                key = f"{number}/{rank}"
                value = self.store.get(key)
                if value is None:
                    continue
                try:
                    peer_phase, is_error, payload = self.decode(key, _unpack_payload, value)
                    error = self.decode(key, self._verdict, payload) if is_error else None
                    if error is not None and "present" in error:
                        raise self._malformed(key, "an error cannot be a good end")
                except TensorParallelError as malformed:
                    return self._give_up(number, malformed.failure)
                if error is not None:
                    return self._decide(number, error)
                seen[rank], phases[rank] = payload, peer_phase
            failed = failure()
            if failed is not None:
                return self._give_up(number, failed)
            need_not_come = excused()
            missing = [rank for rank in range(self.ranks) if rank not in seen and rank not in need_not_come]
            if not missing:
                # the phase of most ranks; a tie goes to the lowest rank's
                right = Counter(phases[rank] for rank in sorted(phases)).most_common(1)[0][0]
                odd = [rank for rank in sorted(phases) if phases[rank] != right]
                if odd:
                    like = self.who(min(rank for rank in phases if phases[rank] == right))
                    what = f"{phases[odd[0]]} where {like} called {right}"
                    return self._give_up(number, Failure("mismatch", odd[0], differs=("collective",), what=what))
                return self._decide(number, {"present": sorted(seen)})
            if began - looked > self.seconds / 4:
                looked = began
                for rank in missing:
                    beat = self.store.get(f"heartbeat/{rank}")
                    if beat != beats.get(rank):
                        beats[rank], alive[rank] = beat, began
            now = time.monotonic()
            if now - began > self.seconds / 4:  # the store served no rank meanwhile, so none could come
                spared = min(now - began, unserved)
                unserved -= spared
                alive = {rank: since + spared for rank, since in alive.items()}
            late = [rank for rank in missing if now - alive[rank] > self.seconds]
            if late:
                return self._give_up(number, Failure("timeout", late[0], what=phase))
            time.sleep(pause)
            pause = min(pause * 1.5, _POLL_AT_MOST)

    def _error_of(self, verdict: dict[str, Any]) -> RemoteError | TensorParallelError | None:
        if "error" in verdict:
            return RemoteError(*verdict["error"])
        if "failure" in verdict:
            failure = self.decode_failure("verdict", verdict["failure"])
            return failure.error(self.who(failure.rank), self.seconds)
        return None

    def _decide(self, number: int, verdict: dict[str, Any]) -> dict[str, Any]:
        key = f"{number}/verdict"
        return self.decode(key, self._verdict, self.store.decide(key, json.dumps(verdict)))

    def _verdict(self, text: bytes) -> dict[str, Any]:
        """Parses a verdict: {"present": ranks}, {"error": [rank, class, message]} or {"failure": ...}."""
        verdict = from_json(text)
        kind = next(iter(verdict)) if isinstance(verdict, dict) and len(verdict) == 1 else None
        if kind == "error":
            error = verdict["error"]
            kinds = [type(each) for each in error] if isinstance(error, list) else []
            if kinds != [int, str, str] or not 0 <= error[0] < self.ranks:
                raise MalformedError("it is no error of a rank of this group")
        elif kind == "present":
            ranks = verdict["present"]
            if not isinstance(ranks, list) or ranks != [rank for rank in range(self.ranks) if rank in ranks]:
                raise MalformedError("present are no ranks of this group")
        elif kind == "failure" and isinstance(verdict["failure"], str):
            self._parse_failure(verdict["failure"])
        else:
            raise MalformedError("it is no verdict")
        return verdict  # type: ignore[no-any-return]

    def _give_up(self, number: int, failure: Failure) -> dict[str, Any]:
        return self._decide(number, {"failure": failure.encoded()})

    @contextlib.contextmanager
    def _store_errors(self) -> Iterator[None]:
        try:
            yield
        except StoreGoneError as error:
            failure = Failure("aborted", self._store_host, what=str(error))
            raise TensorParallelError(failure.message(self.who(self._store_host), self.seconds), failure) from error


def _pack_payload(phase: str, is_error: bool, payload: bytes) -> bytes:
    return f"{phase}\n{int(is_error)}\n".encode() + payload


def _unpack_payload(value: bytes) -> tuple[str, bool, bytes]:
    parts = value.split(b"\n", 2)
    try:
        phase, is_error, payload = parts
        return phase.decode(), {b"0": False, b"1": True}[is_error], payload
    except (ValueError, KeyError):  # fewer lines; no UTF-8; another flag
        raise MalformedError("it is no phase, flag and payload") from None


def _parse_count(value: bytes) -> int:
    if not (value.isdigit() and len(value) < 19):
        raise MalformedError("it is no count")
    return int(value)
