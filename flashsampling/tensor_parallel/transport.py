"""What a group asks of whatever carries the winners between ranks."""

from typing import Protocol

from torch import Tensor

from ..exchange_protocol import Shard
from ..inputs import SampleInputs
from .failures import Failure


class Collectives(Protocol):
    """The messages of a step that takes several.

    Attributes:
        room: int64 words of a message.
        skips: a message that is not wanted is not sent, which only who asks the device can know.
    """

    room: int
    skips: bool

    def begin(self, step: SampleInputs) -> None:
        """Before the messages of a step that asks for something."""
        ...

    def all_gather(
        self,
        words: Tensor,  # (n,) int64, n from 1 to ``room``
        step: SampleInputs,
        wanted: Tensor | None = None,
    ) -> Tensor:
        """(ranks, n), of any strides: the words of all ranks; where the step has failed anything, or the failure is raised.

        ``wanted`` is a number on the device, (1,) int32, the same on all ranks: if it is 0 nobody reads the words, and they may
        be anything, of a message that need not be one."""
        ...

    def end(self, error: BaseException | None = None) -> Tensor | None:
        """After them, and after a call that raised ``error`` since ``begin``: () bool on the device, whether the step has
        failed. None: it has not, or would have raised. Nothing of the step is kept."""
        ...


class SingleRank:
    """``Collectives`` of one rank."""

    room = 1 << 30
    skips = False

    def begin(self, step: SampleInputs) -> None:
        """As the protocol says."""

    def all_gather(self, words: Tensor, step: SampleInputs, wanted: Tensor | None = None) -> Tensor:
        """As the protocol says."""
        return words[None]

    def end(self, error: BaseException | None = None) -> None:
        """As the protocol says."""


class DryRun(SingleRank):
    """``Collectives`` of a rank that meets nobody: what it says, all say.

    Args:
        ranks: of its group.
        room: words of a message.
        skips: whether the group's transport does.
    """

    def __init__(self, ranks: int, room: int, skips: bool = False) -> None:
        self.ranks, self.room, self.skips = ranks, room, skips

    def all_gather(self, words: Tensor, step: SampleInputs, wanted: Tensor | None = None) -> Tensor:
        """As the protocol says."""
        return words.expand(self.ranks, -1)


class Transport(Collectives, Protocol):
    """Made by all ranks together, for one ``TensorParallel``; failures are shared and final.

    What a request asks for takes several messages (``requests``), all between ``begin`` and ``end``, and each a step of its own
    as to number and comparison: whatever is promised of a plain step's message is so of each. The time-out is of each too, but
    with gloo of all messages of a step together.

    Attributes:
        name: "p2p", "nccl" or "gloo".
        left_out: calls that were no step of this transport, but count as one (``TensorParallel.skipped_calls``); the
        group sets it.
    """

    name: str
    skipped_calls: int

    def shard(self, first_token: int) -> Shard:
        """What a kernel is told."""
        ...

    def dry_run_transport(self, first_token: int) -> Shard:
        """What a kernel is told that is compiled and run before the first step: as ``shard``, but it meets no other rank."""
        ...

    def compare(self, step: SampleInputs) -> None:
        """Before the launch of a step with more than a plain one (``SampleInputs.params``,
        ``SampleInputs.draft_hash``), if the launch does the
        exchange itself and knows nothing of that: where ranks differ in it, the step has failed."""
        ...

    def finish(
        self,
        out: Tensor,  # (B * num_samples,) int64, what the implementation wrote
        step: SampleInputs,
    ) -> Tensor:
        """(B * num_samples,) token ids."""
        ...

    def failure(self) -> Failure | None:
        """The group's failure as far as it is known here. No device is asked, so it can be had of a broken one."""
        ...

    def declare(self, failure: Failure) -> Failure:
        """Makes the group fail on all ranks. Returns the failure that was declared first."""
        ...

    def drain(self) -> None:
        """After a failure: takes part in what other ranks' devices wait for, if they do for longer than a bound of their own.
        A call that raises the failure does this first. Raises nothing."""
        ...

    def close(self, everybody: bool) -> None:
        """Ends it. Memory that another rank, or a step that hangs, may still touch is kept unless ``everybody`` is at it too
        and done."""
        ...
