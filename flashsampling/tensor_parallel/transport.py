"""The interface of transports, which carry winners, logits and results between ranks."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..exchange_protocol import PACKED, Shard
from ..inputs import SampleInputs
from .failures import Failure


class Collectives:
    """The messages of a step whose rows need the whole vocabulary's logits (``filtered_sampling``)."""

    room: int  # int64 words that fit in a message
    rows_at_once: int | None = None  # rows of a batch whose logits are exchanged at once; None: all

    def begin(self, step: SampleInputs) -> None:
        """Begins a step: its parameters are compared with every message that follows."""

    def all_gather(
        self,
        words: Tensor,  # (n,) int64, n from 1 to ``room``
        step: SampleInputs,
    ) -> Tensor:
        """Returns the words of all ranks, (ranks, n), of any strides. Of a failed step it returns any words, or
        raises."""
        raise NotImplementedError

    def drawn_rows(self, batch: int) -> tuple[int, int]:
        """Returns the rows [first, last) of a batch that this rank draws: all, where every rank draws all."""
        return 0, batch

    def gather_logits(
        self,
        logits: Tensor,  # (B, n) float32, of this rank's shard
        bias: Tensor | None,  # (n,) float32, of the LM head, to be added
        ranges: Sequence[tuple[int, int]],  # ids of every rank's tokens, [first, last)
        step: SampleInputs,
    ) -> Tensor:
        """Returns the logits of the rows that this rank draws, (rows, V) float32, rows a multiple of 16 bytes apart.

        Of a failed step it returns any numbers, or raises. The next call may overwrite them."""
        if bias is not None:
            logits = logits + bias
        widest = max(last - first for first, last in ranges)
        sent = torch.nn.functional.pad(logits, (0, widest - logits.shape[1])).flatten()
        words = torch.nn.functional.pad(sent, (0, len(sent) % 2)).view(torch.int64)
        received = torch.cat([self.all_gather(some, step) for some in words.split(self.room)], dim=1)
        by_rank = received.contiguous().view(torch.float32)[:, : len(sent)].view(len(ranges), -1, widest)
        rows = empty_rows(len(logits), max(last for _, last in ranges), logits.device)
        for part, (first, last) in zip(by_rank, ranges):
            rows[:, first:last] = part[:, : last - first]
        return rows

    def gather_results(
        self,
        words: Tensor,  # (rows, n) int64, of the rows that this rank draws
        batch: int,
        step: SampleInputs,
    ) -> Tensor:
        """Returns the words of all rows of a batch, (batch, n) int64, contiguous."""
        return words

    def end(self, error: BaseException | None = None) -> Tensor | None:
        """Ends the step and drops its parameters; ``error`` is the exception that left it, if any.

        Returns:
            () bool on the device, whether the step has failed; None where a failed step raises.
        """
        return None


def empty_rows(rows: int, vocab_size: int, device: torch.device) -> Tensor:
    """Returns uninitialised (rows, vocab_size) float32, rows a multiple of 16 bytes apart."""
    return torch.empty((rows, -(-vocab_size // 4) * 4), dtype=torch.float32, device=device)[:, :vocab_size]


class DryRun(Collectives):
    """``Collectives`` of a rank that runs without the others, on any logits."""

    def gather_logits(
        self, logits: Tensor, bias: Tensor | None, ranges: Sequence[tuple[int, int]], step: SampleInputs
    ) -> Tensor:
        """Implements ``Collectives.gather_logits``."""
        return empty_rows(len(logits), max(last for _, last in ranges), logits.device)


class Transport(Collectives):
    """Carries the winners of one ``TensorParallel``. All ranks make it together. Failures are shared and final.

    A step with filters, log-probabilities or drafts to be rejected has several messages, all between ``begin`` and
    ``end``. Each message has a step number of its own and is compared like the message of a plain step. The time-out
    applies to each message; with gloo it applies to all messages of a step together.
    """

    def set_skipped_calls(self, count: int) -> None:
        """Sets how many calls of this rank exchanged nothing (``TensorParallel.skipped_calls``); they count as
        steps."""
        raise NotImplementedError

    def shard(self, first_token: int) -> Shard:
        """Returns the shard description for kernels, which leave packed winners."""
        return Shard(first_token, PACKED)

    def dry_run_transport(self, first_token: int) -> Shard:
        """Returns the shard description for a dry run: kernels are compiled and run without meeting other ranks."""
        return self.shard(first_token)

    def dry_run(self) -> Collectives:
        """Returns the collectives of a dry run, which compile what those of a step compile."""
        return DryRun()

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

    def close(self, all_done: bool) -> bool:
        """Closes the transport. ``all_done``: all ranks close and their devices are done.

        Otherwise memory that another rank, or a step that hangs, may still touch is kept. Returns whether the transport
        goes on with the rendezvous, and ends it."""
        return False


class SingleRank(Transport):
    """The transport of a group with one rank, whose kernels leave token ids."""

    room = 1 << 30

    def shard(self, first_token: int) -> Shard:
        """Implements ``Transport.shard``."""
        return Shard(first_token)

    def set_skipped_calls(self, count: int) -> None:
        """Implements ``Transport.set_skipped_calls``: there is no rank to compare with."""

    def finish(self, out: Tensor, step: SampleInputs) -> Tensor:
        """Implements ``Transport.finish``."""
        return out

    def all_gather(self, words: Tensor, step: SampleInputs) -> Tensor:
        """Implements ``Collectives.all_gather``."""
        return words[None]

    def failure(self) -> Failure | None:
        """Implements ``Transport.failure``: no step fails."""
        return None

    def declare(self, failure: Failure) -> Failure:
        """Implements ``Transport.declare``."""
        return failure
