"""Who keeps the others waiting in transport ``nccl``: what a rank's thread posts, looks for and concludes. No device is asked.

NCCL waits for a rank that does not come for as long as the process group's time-out, and cannot say who it is. So every rank
has a thread that posts to the store which step it began and ended, and a count that moves while the process lives
(``Watchdog``).
A rank whose step began and did not end within the time-out compares all ranks' posts (``straggler``) and declares a failure in
the store, and every thread hears of it at its next look. The thread makes no CUDA call: it disturbs no capture, and waits for
no device.

    bound: timeout + 3 s from the beginning of the all-gather that hangs to the error on all ranks (looks are 0.2 to 1 s apart)
"""

import struct
from collections.abc import Sequence
from typing import NamedTuple

from .failures import Failure, TensorParallelError
from .rendezvous import Rendezvous
from .serialization import MalformedError
from .store import StoreGoneError


class Heartbeat(NamedTuple):
    """What a rank's thread posts.

    Attributes:
        begun: all-gathers that began.
        ended: all-gathers that ended.
        beat: moves while the process lives.
        issued: all-gathers that the host has issued and that have not begun; less those of graph replays.
        knows: 1 if the host knows that the group has failed. It issues no more then.
    """

    begun: int
    ended: int
    beat: int = 0
    issued: int = 0
    knows: int = 0

    def packed(self) -> bytes:
        """For the store."""
        return struct.pack("<5q", *self)

    @staticmethod
    def unpacked(value: bytes) -> "Heartbeat":
        """What ``packed`` made. Raises ``serialization.MalformedError`` for anything else."""
        if len(value) != struct.calcsize("<5q"):
            raise MalformedError(f"a post has {struct.calcsize('<5q')} bytes, this has {len(value)}")
        return Heartbeat(*struct.unpack("<5q", value))


def straggler(before: Sequence[Heartbeat | None], now: Sequence[Heartbeat | None], begun: int) -> int | None:
    """Whom a rank waits for that hangs in its all-gather number ``begun``; None if every rank is in it and lives.

    Args:
        before: by rank, posts of some looks ago; None where there is none.
        now: by rank, posts of this moment.
        begun: what the rank that asks has begun.

    Returns:
        Of the ranks whose process does not move any more, the one that is furthest behind; else, of those behind, first one
        that is in no step at all, since one that is in a step waits itself. Of equals, the lowest.
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
    """What a rank's thread does at every look; apart from device and clock, so that both can be stood in for.

    Args:
        rendezvous: of the group.
        seconds: how long a step may hang.
        holder: rank that probably holds the store.

    Attributes:
        period: seconds between two looks, on all ranks alike.
    """

    def __init__(self, rendezvous: Rendezvous, seconds: float, holder: int) -> None:
        self.period = min(max(seconds / 10, 0.2), 1.0)
        self._rendezvous, self._seconds, self._holder = rendezvous, seconds, holder
        self._beat = 0
        self._begun, self._since = -1, 0.0
        self._before: tuple[float, list[Heartbeat | None]] | None = None
        self._store_gone = False

    def post(self, progress: Heartbeat) -> None:
        """For the other ranks' threads."""
        self._beat += 1
        self._rendezvous.store.set(heartbeat_of(self._rendezvous.rank), progress._replace(beat=self._beat).packed())

    def look(self, progress: Heartbeat, step: int, now: float) -> Failure | None:
        """Posts this rank's progress; the group's failure, decided now if an all-gather has hung for too long.

        Args:
            progress: of this rank.
            step: number of the step that began last.
            now: seconds.
        """
        begun, ended = progress.begun, progress.ended
        try:
            if not self._store_gone:
                self.post(progress)
                failure = self._rendezvous.declared()
                if failure is not None:
                    return failure
        except StoreGoneError:
            self._store_gone = True
        if begun <= ended or begun != self._begun:
            self._begun, self._since, self._before = begun, now, None
            return None
        hung = now - self._since
        if hung < self._seconds / 2:
            return None
        if self._store_gone:
            if hung < self._seconds:
                return None
            others = [rank for rank in range(self._rendezvous.ranks) if rank != self._rendezvous.rank]
            rank = self._holder if self._holder in others else others[0]
            return Failure("late", rank, step)
        try:
            posts = posts_of(self._rendezvous)
        except StoreGoneError:
            self._store_gone = True
            return None
        except TensorParallelError as error:
            return self._rendezvous.declare(error.failure)
        if self._before is None:
            self._before = now, posts
        # every thread that lives has had several looks since
        if hung < self._seconds or now - self._before[0] < 4 * self.period:
            return None
        late = straggler(self._before[1], posts, begun)
        if late is None:
            if hung < 2 * self._seconds:  # all ranks are in this step: it may yet end
                return None
            what = "all ranks are in this step, but its all-gather does not end"
            return self._rendezvous.declare(Failure("left", self._rendezvous.rank, step, what=what))
        return self._rendezvous.declare(Failure("late", late, step))


def heartbeat_of(rank: int) -> str:
    """The key in the store under which a rank's thread posts."""
    return f"progress/{rank}"


def posts_of(rendezvous: Rendezvous) -> list[Heartbeat | None]:
    """By rank, what its thread posted last.

    Raises:
        TensorParallelError: the store holds what no rank posts.
        StoreGoneError: it does not answer.
    """
    posts: list[Heartbeat | None] = []
    for rank in range(rendezvous.ranks):
        value = rendezvous.store.get(heartbeat_of(rank))
        posts.append(None if value is None else rendezvous.checked(heartbeat_of(rank), Heartbeat.unpacked, value))
    return posts
