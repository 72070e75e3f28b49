"""Collective calls over a process group's store that end within a bound, even if ranks fail.

A process group's own collectives wait for its time-out, 10 to 30 minutes, and are undefined once a rank has left them.
Here every exchange has a number. Each rank posts its value under that number and polls for the values of its peers and
for two keys that any rank may set. The first rank that sets one of them decides (``compare_set``), and all follow:

    event                             key              result
    all values are there                               the values
    a rank has an error instead       NUMBER/error     all raise it, with the rank's name
    a rank does not come              failure          all raise its name, and so does the late rank
    ranks are in different calls      failure          all raise a mismatch
    the group failed meanwhile        failure          all raise that failure

An error ends one exchange, a failure all that follow: if all values come just as a rank gives up, the others learn of
the failure in their next call. Every rank takes part in every exchange once, whatever the result, so all have the same
number afterwards. The next group has a key prefix of its own and works.

The store has no authentication. Values read from it are checked (``decode``), and a value that no rank writes ends in a
TensorParallelError.

A rank that works between two exchanges (compiling, for example) posts heartbeats, and its peers wait for it
(``heartbeat``).
"""

import contextlib
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from typing import Any, TypeVar

from torch.distributed import Store

from .failures import Failure, TensorParallelError
from .serialization import MalformedError, from_text, parse_record, to_text
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
        self.rank, self.ranks, self.seconds, self.who, self.store_host = rank, ranks, seconds, who, store_host
        self.store = BoundedStore(connect, seconds)
        try:
            with self._store_errors():
                key = f"groups/{rank}"
                value = self.store.get(key)
                self.number = 0 if value is None else self.decode(key, _parse_count, value)
                self.store.set(key, str(self.number + 1))
        except TensorParallelError:
            self.store.end()
            raise
        self.store.prefix = f"{self.number}/"
        self._exchanges = 0

    def exchange(
        self,
        phase: str,
        value: Any = None,
        check: Callable[[Any], T] = lambda value: value,
        failure: Callable[[], Failure | None] = lambda: None,
    ) -> list[T]:
        """Returns the values of all ranks, by rank.

        Args:
            phase: name of the call; ranks must agree on it.
            value: this rank's value, of types that ``serialization.to_text`` takes.
            check: returns what ``exchange`` returns for a rank's value. Raises MalformedError for a value that no rank
                posts.
            failure: returns a failure of the group that the store may not hold yet; it is polled.

        Raises:
            RemoteError: a rank had an error instead of a value.
            TensorParallelError: a rank did not come, was in another exchange, or the group failed.
        """
        number = self._exchanges
        values = self._exchange(phase, value, failure, None)
        if number:  # all ranks are here, so all have read the exchange before
            self.store.delete(f"{number - 1}/{self.rank}")
        return [self.decode(f"{phase} of {self.who(rank)}", check, values[rank]) for rank in range(self.ranks)]

    def close(self, is_done: bool, culprit: Callable[[], int | None]) -> bool:
        """Waits for all ranks to close the group, but for ranks that have left it and for the rank that made it fail
        (``culprit``, which is polled).

        Returns:
            Whether all ranks are here and ``is_done`` on all of them.

        Raises:
            TensorParallelError: a rank did not come, or was in another exchange.
        """

        def excused() -> Collection[int]:
            rank = culprit()
            return [each for each in range(self.ranks) if each == rank or self._has_left(each)]

        try:
            values = self._exchange("closing", is_done, lambda: None, excused)
        finally:
            self.leave()
        # the store host's process may end now, and the store with it
        until = time.monotonic() + _LINGER
        with contextlib.suppress(StoreGoneError):
            while self.rank == self.store_host and time.monotonic() < until and not all(map(self._has_left, values)):
                time.sleep(_POLL_AT_FIRST)
        return all(values.get(rank) is True for rank in range(self.ranks))

    def leave(self) -> None:
        """Says that this rank closes the group by itself: no rank that closes waits for it. Never raises."""
        with contextlib.suppress(StoreGoneError):
            self.store.set(f"left/{self.rank}", "1")

    def _has_left(self, rank: int) -> bool:
        return self.store.get(f"left/{rank}") is not None

    def fail(self, error: BaseException) -> RemoteError | TensorParallelError:
        """Takes part in the next exchange with an error, which ends it for all ranks at once.

        Returns:
            The exception that all other ranks raise: for this error, or for an earlier one.
        """
        number, self._exchanges = self._exchanges, self._exchanges + 1
        try:
            with self._store_errors():
                failure = self.declare(error.failure) if isinstance(error, TensorParallelError) else self.declared()
                if failure is not None:
                    return self.error(failure)
                key, text = f"{number}/error", to_text((self.rank, type(error).__name__, str(error)))
                return self.decode(key, self._parse_error, self.store.decide(key, text))
        except TensorParallelError as gone:
            return gone

    def next_has_failed(self) -> bool:
        """Returns whether the next exchange will raise, because another rank has an error."""
        return self.store.get(f"{self._exchanges}/error") is not None or self.declared() is not None

    @contextlib.contextmanager
    def heartbeat(self) -> Iterator[None]:
        """Posts heartbeats while the block runs: peers wait for this rank as long as its process lives.

        An exception in the block ends the next exchange for all ranks."""
        ended = threading.Event()

        def beat() -> None:
            count = 0
            with contextlib.suppress(StoreGoneError):
                while not ended.is_set():
                    count += 1
                    self.store.set(f"heartbeat/{self.rank}", str(count))
                    ended.wait(min(self.seconds / 4, 1.0))

        thread = threading.Thread(target=beat, name="flashsampling heartbeat", daemon=True)
        thread.start()
        try:
            yield
        except Exception as error:
            agreed = self.fail(error)
            if isinstance(error, TensorParallelError):  # all ranks raise the same
                raise agreed from error
            raise
        finally:
            ended.set()
            thread.join()

    def declare(self, failure: Failure) -> Failure:
        """Declares a failure for all ranks. Returns the one that was declared first. Never raises."""
        try:
            return self.decode("failure", self._parse_failure, self.store.decide("failure", to_text(failure)))
        except StoreGoneError:
            return failure
        except TensorParallelError as error:
            return error.failure

    def declared(self) -> Failure | None:
        """Returns the declared failure, or None. Raises StoreGoneError if the store does not answer.

        A value that no rank writes is a failure of this rank."""
        text = self.store.get("failure")
        try:
            return None if text is None else self.decode("failure", self._parse_failure, text)
        except TensorParallelError as error:
            return error.failure

    def try_declared(self) -> Failure | None:
        """Returns ``declared()``, or None if the store does not answer."""
        with contextlib.suppress(StoreGoneError):
            return self.declared()
        return None

    def error(self, failure: Failure) -> TensorParallelError:
        """Returns the exception for a failure."""
        return failure.error(self.who(failure.rank), self.seconds)

    def decode(self, key: str, decode: Callable[[Any], T], value: Any) -> T:
        """Decodes a value of the store. Raises TensorParallelError where ``decode`` raises a MalformedError: this rank
        gives up, because it cannot know which process wrote the value."""
        try:
            return decode(value)
        except MalformedError as error:
            what = (
                f"the process group's store holds what no rank wrote ({key}: {error}); who can write there: SECURITY.md"
            )
            raise self.error(Failure("aborted", self.rank, what=what)) from error

    def _exchange(
        self,
        phase: str,
        value: Any,
        failure: Callable[[], Failure | None],
        excused: Callable[[], Collection[int]] | None,
    ) -> dict[int, Any]:
        """Returns the values of the ranks that came. ``excused`` returns the ranks that need not come; it is polled.
        None: all must come, and a failure of the group ends the exchange."""
        number, self._exchanges = self._exchanges, self._exchanges + 1
        try:
            with self._store_errors():
                if not excused and (failed := self._failure(number, failure)) is not None:
                    raise self.error(failed)
                self.store.set(f"{number}/{self.rank}", to_text((phase, value)))
                posts = self._wait(number, phase, failure, excused)
                phases = {rank: posts[rank][0] for rank in sorted(posts)}
                right = Counter(phases.values()).most_common(1)[0][0]  # a tie goes to the lowest rank's
                odd = [rank for rank, other in phases.items() if other != right]
                if odd:
                    like = self.who(next(rank for rank, other in phases.items() if other == right))
                    what = f"{phases[odd[0]]} where {like} called {right}"
                    raise self.error(Failure("mismatch", odd[0], differs=("collective",), what=what))
                return {rank: value for rank, (_, value) in posts.items()}
        except TensorParallelError as error:
            raise self.error(self.declare(error.failure)) from error.__cause__

    def _wait(
        self,
        number: int,
        phase: str,
        failure: Callable[[], Failure | None],
        excused: Callable[[], Collection[int]] | None,
    ) -> dict[int, tuple[str, Any]]:
        """Returns the phase and the value of every rank that came."""
        posts: dict[int, tuple[str, Any]] = {}
        alive = dict.fromkeys(range(self.ranks), time.monotonic())  # time of the last heartbeat
        beats: dict[int, bytes | None] = {}
        unserved = self.store.seconds  # extra seconds that the store may take to answer
        looked, pause = -math.inf, _POLL_AT_FIRST  # the first look only records old heartbeats
        while True:
            began = time.monotonic()
            failed = None if excused else self._failure(number, failure)
            need_not_come = excused() if excused else ()  # before values are read: a rank posts its value, then leaves
            for rank in range(self.ranks):
                key = f"{number}/{rank}"
                if rank not in posts and (value := self.store.get(key)) is not None:
                    posts[rank] = self.decode(key, _parse_post, value)
            missing = [rank for rank in range(self.ranks) if rank not in posts and rank not in need_not_come]
            if not missing:  # not even a failure counts then, which a faster rank may have declared since
                return posts
            if failed is not None:
                raise self.error(failed)
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
                raise self.error(Failure("timeout", late[0], what=phase))
            time.sleep(pause)
            pause = min(pause * 1.5, _POLL_AT_MOST)

    def _failure(self, number: int, failure: Callable[[], Failure | None]) -> Failure | None:
        """Returns the group's failure, if there is one. Raises a rank's error in the exchange."""
        failed = failure() or self.declared()
        key = f"{number}/error"
        error = self.store.get(key)  # read last: a rank that declares a failure too sets the error before it
        if error is not None:
            raise self.decode(key, self._parse_error, error)
        return failed

    def _parse_failure(self, text: bytes) -> Failure:
        failure = parse_record(Failure, from_text(text))
        if not 0 <= failure.rank < self.ranks:
            raise MalformedError(f"there is no rank {failure.rank}")
        return failure

    def _parse_error(self, text: bytes) -> RemoteError:
        match from_text(text):
            case (int(rank), str(kind), str(message)) if 0 <= rank < self.ranks:
                return RemoteError(rank, kind, message)
        raise MalformedError("it is no error of a rank of this group")

    @contextlib.contextmanager
    def _store_errors(self) -> Iterator[None]:
        try:
            yield
        except StoreGoneError as error:
            raise self.error(Failure("aborted", self.store_host, what=str(error))) from error


def _parse_post(text: bytes) -> tuple[str, Any]:
    match from_text(text):
        case (str(phase), value):
            return phase, value
    raise MalformedError("it is no phase and value")


def _parse_count(value: bytes) -> int:
    if not (value.isdigit() and len(value) < 19):
        raise MalformedError("it is no count")
    return int(value)
