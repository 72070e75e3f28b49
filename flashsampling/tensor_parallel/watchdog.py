"""The watchdog of transport ``nccl``: finds the straggler that an all-gather waits for. It makes no device call.

NCCL waits for a missing rank until the process group's time-out and cannot name it. Every rank therefore has a thread
that posts heartbeats to the store: how many all-gathers it began and ended, over both communicators, and a count that
moves while the process lives. A rank whose all-gather does not end within the time-out compares all ranks' heartbeats
(``straggler``) and declares a failure in the store. Every thread reads the failure at its next look. Until then the
thread makes no CUDA call, so it disturbs no capture and waits for no device.

The error comes on all ranks at most timeout + 3 s after the beginning of the all-gather that hangs. Looks are 0.2 to
1 s apart.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from .failures import Failure, TensorParallelError
from .rendezvous import Rendezvous
from .serialization import from_text, parse_record, to_text
from .store import StoreGoneError


@dataclass(frozen=True)
class Heartbeat:
    """The progress that a rank's thread posts."""

    begun: int  # all-gathers that began
    ended: int
    beat: int = 0  # moves while the process lives
    issued: int = 0  # all-gathers that the host has issued and that have not begun, without those of graph replays
    knows: int = 0  # 1 if the host knows that the group has failed; it issues no more all-gathers then
    bulk: int = 0  # of those that began, the ones with logits


def straggler(before: Sequence[Heartbeat | None], now: Sequence[Heartbeat | None], begun: int) -> int | None:
    """Finds the rank that all-gather number ``begun`` waits for, from earlier and the newest heartbeats, by rank.

    Returns:
        Among ranks whose heartbeat has stopped, the one furthest behind. Otherwise, among ranks behind, one that is in
        no step before one that is in a step, because the latter waits too. Ties go to the lowest rank. None if every
        rank is in the all-gather and lives.
    """
    table = list(enumerate(zip(before, now)))
    still = [
        (new.begun if new else -1, rank) for rank, (old, new) in table if new is None or (old and old.beat == new.beat)
    ]
    if still:
        return min(still)[1]
    behind = [(new.begun != new.ended, new.begun, rank) for rank, (_, new) in table if new and new.begun < begun]
    return min(behind)[2] if behind else None


class Watchdog:
    """Posts this rank's heartbeat and looks for stragglers: steps that hang for ``seconds``. Has neither device nor
    clock, so tests can replace both."""

    def __init__(self, rendezvous: Rendezvous, seconds: float) -> None:
        self.period = min(max(seconds / 10, 0.2), 1.0)  # seconds between two looks, the same on all ranks
        self._rendezvous, self._seconds = rendezvous, seconds
        self._beat = 0
        self._begun, self._since = -1, 0.0
        self._before: tuple[float, list[Heartbeat | None]] | None = None

    def post(self, progress: Heartbeat) -> None:
        """Posts a heartbeat for the other ranks' threads."""
        self._beat += 1
        self._rendezvous.store.set(heartbeat_key(self._rendezvous.rank), to_text(replace(progress, beat=self._beat)))

    def look(self, progress: Heartbeat, step: int, now: float) -> Failure | None:
        """Posts this rank's heartbeat and returns the group's failure, if there is one.

        Declares a failure if an all-gather has hung for too long. ``step``: number of the one that began last."""
        if progress.begun <= progress.ended or progress.begun != self._begun:
            self._begun, self._since, self._before = progress.begun, now, None
        hung = now - self._since
        try:
            self.post(progress)
            failure = self._rendezvous.declared()
            if failure is not None or hung < self._seconds / 2:
                return failure
            posts = read_heartbeats(self._rendezvous)
        except StoreGoneError:
            return Failure("timeout", self._rendezvous.store_host, step) if hung >= self._seconds else None
        except TensorParallelError as error:
            return self._rendezvous.declare(error.failure)
        if self._before is None:
            self._before = now, posts
        # by now every live thread has looked several times
        if hung < self._seconds or now - self._before[0] < 4 * self.period:
            return None
        late = straggler(self._before[1], posts, progress.begun)
        if late is not None:
            return self._rendezvous.declare(Failure("timeout", late, step))
        if hung < 2 * self._seconds:  # all ranks are in this step, so it may still end
            return None
        what = "all ranks are in this step, but its all-gather does not end"
        return self._rendezvous.declare(Failure("aborted", self._rendezvous.rank, step, what=what))


def heartbeat_key(rank: int) -> str:
    """Returns the store key of a rank's heartbeat."""
    return f"progress/{rank}"


def read_heartbeats(rendezvous: Rendezvous) -> list[Heartbeat | None]:
    """Returns the last heartbeat of every rank, by rank.

    Raises:
        TensorParallelError: the store holds bytes that no rank writes.
        StoreGoneError: the store does not answer.
    """
    keys = map(heartbeat_key, range(rendezvous.ranks))
    values = [(key, rendezvous.store.get(key)) for key in keys]
    return [None if value is None else rendezvous.decode(key, _parse_heartbeat, value) for key, value in values]


def _parse_heartbeat(text: bytes) -> Heartbeat:
    return parse_record(Heartbeat, from_text(text))
