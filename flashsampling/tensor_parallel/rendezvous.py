"""Collective calls over a process group's store that end within a bound, whoever fails and why.

A process group's own collectives wait for its time-out, 10 to 30 minutes, and are undefined once a rank has left them. Here an
exchange has a number. Every rank posts its payload, or why it has none, under that number, and looks for the others'. How it
ended is one key, the verdict, that the first to know sets by ``compare_set`` and everybody follows:

    all are there                     whoever has seen all payloads      they are the result
    a rank posted an error            whoever sees it first              all raise, with the rank's name
    a rank does not come              whoever waited too long            all raise its name, the latecomer too when it comes
    ranks are in different exchanges  whoever has seen all               all raise it
    the group failed meanwhile        whoever hears of it first          all raise that failure

So no rank takes part in an exchange that another has given up, all ranks are at the same number afterwards, and the next group,
whose keys have a prefix of its own, works.

The store has no authentication. What is read from it is checked, and what no rank wrote ends in a TensorParallelError
(``checked``).

A rank that is at work between two exchanges (compiling, say) says so by a count that moves, ``busy``; it is waited for.
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
    """Another rank could not take part in an exchange. Raised by all but that one.

    Attributes:
        rank: which.
        kind: name of the exception's class there.
        message: what it said.
    """

    def __init__(self, rank: int, kind: str, message: str) -> None:
        super().__init__(f"rank {rank}: {kind}: {message}")
        self.rank, self.kind, self.message = rank, kind, message


class Rendezvous:
    """The exchanges of one group, from its construction until it is closed.

    Args:
        connect: gives the process group's store, see ``store.store_of``.
        rank: this one.
        ranks: how many there are.
        seconds: the bound: how long a rank that gives no sign of life is waited for.
        who: a rank's name in messages.
        holder: rank that probably holds the store, to name when it is gone.

    Attributes:
        number: how many groups this rank began to make over this store, this one not counted. Counted in the store, by rank,
            before anything can fail: ranks stay in step whatever happens, and if a process is replaced.

    Raises:
        TensorParallelError: the store is gone.
    """

    def __init__(
        self,
        connect: Callable[[], Store],
        rank: int,
        ranks: int,
        seconds: float,
        who: Callable[[int], str] = "rank {}".format,
        holder: int = 0,
    ) -> None:
        self.rank, self.ranks, self.seconds, self.who, self._holder = rank, ranks, seconds, who, holder
        self.store = BoundedStore(connect, seconds)
        try:
            with self._store_errors():
                key = f"groups/{rank}"  # of this rank alone; ``add`` of a number that is none closes the connection
                value = self.store.get(key)
                self.number = 0 if value is None else self.checked(key, _count_of, value)
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
        """All ranks' payloads. None for ranks that were excused and did not come.

        Args:
            phase: what this is, in words; ranks must agree.
            payload: this rank's.
            failure: a failure of the group that ends the exchange; asked again and again.
            excused: ranks that need not come; asked again and again. None: all must.

        Raises:
            RemoteError: a rank had an error instead of a payload.
            TensorParallelError: a rank did not come, was in another exchange, or the group failed.
        """
        number, self._exchanges = self._exchanges, self._exchanges + 1
        with self._store_errors():
            self.store.set(f"{number}/{self.rank}", _sealed(phase, False, payload))
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
                    seen[rank] = self.checked(key, _opened, self.store.get(key) or b"")[2]  # none: a verdict lied
            if len(verdict["present"]) == self.ranks and number:
                # all are here, so all have read what was before
                self.store.delete(f"{number - 1}/{self.rank}")
                if self.rank == 0:
                    self.store.delete(f"{number - 1}/verdict")
        return [seen[rank] if rank in verdict["present"] else None for rank in range(self.ranks)]

    def fail(self, phase: str, error: BaseException) -> RemoteError | TensorParallelError:
        """Takes part in the next exchange by an error, which ends it for all ranks at once.

        Returns:
            What all other ranks raise: of this error, or of what had ended the exchange before.
        """
        number, self._exchanges = self._exchanges, self._exchanges + 1
        verdict: dict[str, Any] = {"error": [self.rank, type(error).__name__, str(error)]}
        if isinstance(error, TensorParallelError):  # all raise the same
            verdict = {"failure": error.failure.encoded()}
        try:
            with self._store_errors():
                self.store.set(f"{number}/{self.rank}", _sealed(phase, True, json.dumps(verdict).encode()))
                agreed = self._error_of(self._decide(number, verdict))
        except TensorParallelError as gone:
            return gone
        return agreed or self._malformed(f"{number}/verdict", "it ended well without this rank")

    def over(self) -> bool:
        """Whether the next exchange has ended before this rank came to it: another rank has an error."""
        return self.store.get(f"{self._exchanges}/verdict") is not None

    def post(self, phase: str) -> None:
        """Takes part in the next exchange without waiting for anybody; for a rank that leaves. Also in the one behind it, where
        whoever is in another call just now comes to. Never raises."""
        first, self._exchanges = self._exchanges, self._exchanges + 2
        with contextlib.suppress(StoreGoneError):
            for number in (first, first + 1):
                self.store.set(f"{number}/{self.rank}", _sealed(phase, False, b""))
            self.store.add("parted", 1)

    @contextlib.contextmanager
    def busy(self, phase: str | None = None) -> Iterator[None]:
        """While in here, the others wait for this rank however long it takes, as long as the process lives. An exception takes
        part in the next exchange, ``phase``, if one is named: it ends it for all."""
        ended = threading.Event()

        def beat() -> None:
            count = 0
            with contextlib.suppress(StoreGoneError):
                while not ended.is_set():
                    count += 1
                    self.store.set(f"busy/{self.rank}", str(count).encode())
                    ended.wait(min(self.seconds / 4, 1.0))

        thread = threading.Thread(target=beat, name="flashsampling busy", daemon=True)
        thread.start()
        try:
            yield
        except Exception as error:
            if phase is not None:
                agreed = self.fail(phase, error)
                if isinstance(error, TensorParallelError):  # all raise the same
                    raise agreed from error
            raise
        finally:
            ended.set()
            thread.join()

    def declare(self, failure: Failure) -> Failure:
        """Decides a failure for all ranks; returns the one that was decided first. Never raises."""
        try:
            return self.failure_of("failure", self.store.decide("failure", failure.encoded()))
        except StoreGoneError:
            return failure
        except TensorParallelError as error:
            return error.failure

    def declared(self) -> Failure | None:
        """The failure that was decided, if any was. StoreGoneError if that cannot be known. What no rank wrote is a failure."""
        text = self.store.get("failure")
        try:
            return None if text is None else self.failure_of("failure", text)
        except TensorParallelError as error:
            return error.failure

    def known(self) -> Failure | None:
        """``declared``, or None if that cannot be known."""
        with contextlib.suppress(StoreGoneError):
            return self.declared()
        return None

    def part(self, present: int) -> None:
        """After the last exchange, by as many ranks as were in it. The one whose process holds the store, and may end now,
        stays until all have read how the exchange ended."""
        with contextlib.suppress(StoreGoneError):
            parted = self.store.add("parted", 1)
            until = time.monotonic() + _LINGER
            while self.rank == self._holder and parted < present and time.monotonic() < until:
                time.sleep(_POLL_AT_FIRST)
                parted = self.store.add("parted", 0)

    def read(self, decode: Callable[[bytes], T], phase: str, payloads: Sequence[bytes]) -> list[T]:
        """All ranks' payloads of an exchange, decoded.

        Raises:
            TensorParallelError: one is nothing that a rank writes.
        """
        return [self.checked(f"{phase} of {self.who(rank)}", decode, payload) for rank, payload in enumerate(payloads)]

    def checked(self, key: str, decode: Callable[[Any], T], value: bytes | str) -> T:
        """A value that the store holds, decoded. Raises TensorParallelError where ``decode`` raises a MalformedError."""
        try:
            return decode(value)
        except MalformedError as error:
            raise self._malformed(key, str(error)) from error

    def _malformed(self, key: str, why: str) -> TensorParallelError:
        """This rank gives up, whoever wrote it: which is all that it knows."""
        what = f"the process group's store holds what no rank wrote ({key}: {why}); who can write there: SECURITY.md"
        failure = Failure("left", self.rank, what=what)
        return TensorParallelError(failure.message(self.who(self.rank), self.seconds), failure)

    def failure_of(self, key: str, text: bytes | str) -> Failure:
        """A failure that the store holds. Raises TensorParallelError where it is none."""
        return self.checked(key, self._decoded, text)

    def _decoded(self, text: bytes | str) -> Failure:
        failure = Failure.decoded(text)
        if not 0 <= failure.rank < self.ranks:
            raise MalformedError(f"there is no rank {failure.rank}")
        return failure

    def share(self) -> None:
        """For one more user of the store, which ends it for itself."""
        with self._lock:
            self._users += 1

    def end(self) -> None:
        """A user needs it no more. The store's thread ends with the last."""
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
        alive = dict.fromkeys(range(self.ranks), now)  # when a rank last gave a sign of life
        beats: dict[int, bytes | None] = {}
        phases = {self.rank: phase}
        unserved = self.store.seconds  # that may pass beside the bound while the store answers nobody
        looked, pause = -math.inf, _POLL_AT_FIRST  # a beat from before is no sign of life now
        while True:
            params = time.monotonic()
            key = f"{number}/verdict"
            verdict = self.store.get(key)
            if verdict is not None:
                return self.checked(key, self._verdict, verdict)
            for rank in [rank for rank in range(self.ranks) if rank not in seen]:
                key = f"{number}/{rank}"
                value = self.store.get(key)
                if value is None:
                    continue
                try:
                    said, is_error, payload = self.checked(key, _opened, value)
                    error = self.checked(key, self._verdict, payload) if is_error else None
                    if error is not None and "present" in error:
                        raise self._malformed(key, "an error is no good end")
                except TensorParallelError as malformed:
                    return self._give_up(number, malformed.failure)
                if error is not None:
                    return self._decide(number, error)
                seen[rank], phases[rank] = payload, said
            failed = failure()
            if failed is not None:
                return self._give_up(number, failed)
            pardoned = excused()
            missing = [rank for rank in range(self.ranks) if rank not in seen and rank not in pardoned]
            if not missing:
                right = Counter(phases[rank] for rank in sorted(phases)).most_common(1)[0][0]  # the first of as many
                odd = [rank for rank in sorted(phases) if phases[rank] != right]
                if odd:
                    like = self.who(min(rank for rank in phases if phases[rank] == right))
                    what = f"{phases[odd[0]]} where {like} called {right}"
                    return self._give_up(number, Failure("differs", odd[0], differs=("collective",), what=what))
                return self._decide(number, {"present": sorted(seen)})
            if params - looked > self.seconds / 4:
                looked = params
                for rank in missing:
                    beat = self.store.get(f"busy/{rank}")
                    if beat != beats.get(rank):
                        beats[rank], alive[rank] = beat, params
            now = time.monotonic()
            if now - params > self.seconds / 4:  # the store served nobody meanwhile, so nobody could come
                spared = min(now - params, unserved)
                unserved -= spared
                alive = {rank: since + spared for rank, since in alive.items()}
            late = [rank for rank in missing if now - alive[rank] > self.seconds]
            if late:
                return self._give_up(number, Failure("late", late[0], what=phase))
            time.sleep(pause)
            pause = min(pause * 1.5, _POLL_AT_MOST)

    def _error_of(self, verdict: dict[str, Any]) -> RemoteError | TensorParallelError | None:
        if "error" in verdict:
            return RemoteError(*verdict["error"])
        if "failure" in verdict:
            failure = self.failure_of("verdict", verdict["failure"])
            return failure.error(self.who(failure.rank), self.seconds)
        return None

    def _decide(self, number: int, verdict: dict[str, Any]) -> dict[str, Any]:
        key = f"{number}/verdict"
        return self.checked(key, self._verdict, self.store.decide(key, json.dumps(verdict)))

    def _verdict(self, text: bytes) -> dict[str, Any]:
        """How an exchange ended: "present", the ranks that were there; "error", what a rank raised; or "failure"."""
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
            self._decoded(verdict["failure"])
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
            failure = Failure("left", self._holder, what=str(error))
            raise TensorParallelError(failure.message(self.who(self._holder), self.seconds), failure) from error


def _sealed(phase: str, is_error: bool, payload: bytes) -> bytes:
    return f"{phase}\n{int(is_error)}\n".encode() + payload


def _opened(value: bytes) -> tuple[str, bool, bytes]:
    parts = value.split(b"\n", 2)
    try:
        phase, is_error, payload = parts
        return phase.decode(), {b"0": False, b"1": True}[is_error], payload
    except (ValueError, KeyError):  # fewer lines; no UTF-8; another flag
        raise MalformedError("it is no phase, flag and payload") from None


def _count_of(value: bytes) -> int:
    if not (value.isdigit() and len(value) < 19):
        raise MalformedError("it is no count")
    return int(value)
