"""The interface of transports, which carry winners between ranks."""

from torch import Tensor

from ..exchange_protocol import PACKED, Shard
from ..inputs import SampleInputs
from .failures import Failure


class Collectives:
    """The messages of a step with several collective rounds."""

    room: int  # int64 words that fit in a message
    skips = False  # whether the device skips a round whose ``wanted`` is 0

    def begin(self, step: SampleInputs) -> None:
        """Begins a step: its parameters are compared with every message that follows."""

    def all_gather(
        self,
        words: Tensor,  # (n,) int64, n from 1 to ``room``
        step: SampleInputs,
        wanted: Tensor | None = None,
    ) -> Tensor:
        """Returns the words of all ranks, (ranks, n), of any strides. Of a failed step it returns any words, or raises.

        ``wanted`` is (1,) int32 on the device, the same on all ranks. If it is 0, no rank reads the result, and the
        message may be skipped."""
        raise NotImplementedError

    def end(self, error: BaseException | None = None) -> Tensor | None:
        """Ends the step and drops its parameters; ``error`` is the exception that left it, if any.

        Returns:
            () bool on the device, whether the step has failed; None where a failed step raises.
        """
        return None


class SingleRank(Collectives):
    """``Collectives`` of a group with one rank."""

    room = 1 << 30

    def all_gather(self, words: Tensor, step: SampleInputs, wanted: Tensor | None = None) -> Tensor:
        """Implements ``Collectives.all_gather``."""
        return words[None]


class DryRun(Collectives):
    """``Collectives`` of a rank that runs without the others: every peer's words are its own. ``room`` and ``skips``
    are those of the group's transport."""

    def __init__(self, ranks: int, room: int, skips: bool = False) -> None:
        self.ranks, self.room, self.skips = ranks, room, skips

    def all_gather(self, words: Tensor, step: SampleInputs, wanted: Tensor | None = None) -> Tensor:
        """Implements ``Collectives.all_gather``."""
        return words.expand(self.ranks, -1)


class Transport(Collectives):
    """Carries the winners of one ``TensorParallel``. All ranks make it together. Failures are shared and final.

    A step with filters or log-probabilities has several messages, all between ``begin`` and ``end``
    (``filtered_sampling``). Each message has a step number of its own and is compared like the message of a plain step.
    The time-out applies to each message; with gloo it applies to all messages of a step together.
    """

    skipped_calls: int  # as of ``TensorParallel``, which sets it

    def shard(self, first_token: int) -> Shard:
        """Returns the shard description for kernels, which leave packed winners."""
        return Shard(first_token, PACKED)

    def dry_run_transport(self, first_token: int) -> Shard:
        """Returns the shard description for a dry run: kernels are compiled and run without meeting other ranks."""
        return self.shard(first_token)

    def compare(self, step: SampleInputs) -> None:
        """Compares parameters and draft hash before the launch of a step whose kernel exchanges winners but not these.

        A step in which ranks differ has failed. Does nothing where messages hold all parameters."""

    def finish(
        self,
        out: Tensor,  # (B * num_samples,) int64, what the implementation wrote
        step: SampleInputs,
    ) -> Tensor:
        """Returns (B * num_samples,) token ids."""
        raise NotImplementedError

    def failure(self) -> Failure | None:
        """Returns the group's failure if this rank knows one.

        Makes no device call, so a broken device does not matter."""
        raise NotImplementedError

    def declare(self, failure: Failure) -> Failure:
        """Makes the group fail on all ranks. Returns the failure that was declared first."""
        raise NotImplementedError

    def drain(self) -> None:
        """Drains outstanding collectives after a failure: takes part in those that other ranks' devices wait for.

        A call that raises the failure does this first. Raises nothing."""

    def close(self, all_done: bool) -> None:
        """Closes the transport. ``all_done``: all ranks close and their devices are done.

        Otherwise memory that another rank, or a step that hangs, may still touch is kept."""
