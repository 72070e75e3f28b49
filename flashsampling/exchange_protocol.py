"""The data that ranks exchange: packed winners, and the peer-to-peer protocol that carries them.

Packed winners
    An int64 per row and draw says all that other ranks need of a shard's scores:

        NAN                     some score is NaN
        (score, id) > 0         the best score, +inf included, and the lowest id with it; some score here is finite
        NO_FINITE | (+inf, id)  the same, but no score here is finite
        NO_FINITE               no score here is above -inf; an empty shard says this

    (score, id) is the key that all kernels order by: the order-preserving bits of the score, then 31 bits of
    complemented id, so the maximum is the best score's lowest id. Two ranks' winners combine by the maximum of the bits
    below NO_FINITE, and by whether any winner is positive. Nothing depends on how a rank tiles its shard.

Peer to peer (transport ``p2p``)
    A rank sends, per row and draw, a message of two words of eight bytes, each half of the winner above a tag:

        winner >> 32 | tag 0        tag 0: a set bit, 15 bits of the step's number, 16 bits of the parameter hash
        winner & 2**32 - 1 | tag 1  tag 1: 31 bits of a hash of the number and the parameter hash, and a set bit

    The parameter hash ("details") has 16 bits of a hash of each of (batch size, draws), seed, offset and temperature. A
    step's number counts the launches of the group on this rank, on the device so that graph replays count, and the
    calls that ended without a launch (``TABLE_LEFT_OUT``, in order of the stream). Eight aligned bytes arrive whole. A
    word of an empty slot is 0 and a word of a message is not: each word is its own flag, and their order does not
    matter.

    Every rank has memory that all ranks map (``SHARED_*``): a word ``failure``; the parameter hashes of its rows; and
    slots, (2, ranks, capacity) of two words, empty at first. Launch number s uses buffer s % 2. The threads that finish
    a row, in the sampling kernel itself,

        1  read ``failure``; if it is not 0, or the group is closed, all tokens are -1, and nothing is sent
        2  store the row's parameter hash, then its message into slot [s % 2, own rank, row] of all ranks, its own too
        3  wait until both words of every rank's slot [s % 2, rank, row] in their own memory have arrived, or
           ``failure``, which they read now and then, is not 0, or the time-out, counted from before 2, has passed
        4  compare tags: the token is that of the winners if all tags are this rank's, else -1
        5  empty these slots if all of the row's arrived and agree; the launch's last thread counts the step

    A thread that finds a rank late or different decides for all: it writes a verdict by compare-and-swap to the word
    ``verdict`` in the FIRST rank's memory, then stores the value found there (its own, or an earlier one) into
    ``failure`` of every rank and into ``told`` in its own host's memory. All rows of that launch are then -1. It reads
    what differs from the other rank's parameter hashes.

    States: normal (``failure`` = 0); failed (not 0, for good), a failed rank sends nothing from its next launch on;
    closed (the table's ranks are 0, for good), other ranks' memory is not touched. normal -> failed -> closed, normal
    -> closed. A replay of a graph reads the current state; one that stores logits must not be replayed once closed,
    because the logits' memory is unmapped.

    edge                                               order
    emptying in step s -> the peers' stores of s + 2   the emptying thread's launch ends before step s + 1 begins (one
                                                       stream); fence.acq_rel.sys, st.relaxed.sys of step s + 1 ->
                                                       ld.acquire.sys of the peer, whose launch ends before it stores
                                                       for s + 2 (Triton: atom.exch.release.sys -> atom.add.acquire.sys)
    a row's parameter hash -> the judge of its message the same: stored before the fence that precedes the message
    a peer's store of step s -> the wait               the same 8 bytes: st.relaxed.sys -> ld.acquire.sys
    verdict -> failure -> a wait, told                 the value says all; nothing else is read because of it

    Why no stale winner is accepted. While no rank has failed, a rank stores for its launch s + 1 only after it received
    every rank's message of its launch s. So two ranks' counts differ by at most one, and a slot [s % 2, r, row]
    receives nothing between its emptying at s and rank r's launch s + 2 (first edge): what launch s finds there was
    stored in launch s. If ranks call with different batch sizes, some slots stay full; but then row 0's tags differ,
    and the group fails in that launch. A failed rank sends nothing from its next launch on, so no rank completes that
    launch: all fail in it or before. What was stored until then belongs to a launch whose tags agree, or is refused.
    Step numbers wrap and hashes can collide (2**-31 a row); neither matters for messages of one rank's past, only for
    telling apart calls that differ. Spreading ``failure`` and reading it while waiting only saves time: otherwise the
    others wait for the time-out. ``tests/tensor_parallel/test_protocol.py`` walks through every interleaving of small
    groups, and shows what each rule here is needed for.

    Filters, log-probabilities and drafts take several messages (``tensor_parallel/filtered_sampling``), each a launch
    and a step of this protocol with words in place of packed winners. A word has a row's parameter hash, and a hash of
    the sampling parameters is mixed into its tags: such a message agrees with none of other parameters and with no
    plain step, though its parameter hash does not differ. If the sampling kernel applies all sampling parameters, or
    drafts are matched, one message with the hash as its word precedes the launch. Logits do not take slots: they are
    stored behind them, and ordered by the message that follows (``kernels/triton/sharded/collectives``).

    One step at a time uses a ``TensorParallel``, in the same order on all ranks, like any collective.

Table: int64 in device memory that outlives the group (a captured graph may hold it), whose
address gives a kernel the rest:

    0 rank   1 ranks, 0 once closed   2 capacity   3 time-out, ns   4 address of told   5 launches
    6 calls without a launch   7 finished blocks of rows   8 a clock   9 ... address of each rank's shared memory

The first failure is one word (``Verdict``): kind, straggler, reporter, what differs, how many steps the straggler is
ahead, the reporter's step."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

NO_TOKEN = 2**31 - 1
NAN = 2**63 - 1
NO_FINITE = -(2**63)

TOKENS = 0  # values of Shard.exchange that are no address
PACKED = 1

TABLE_RANK, TABLE_RANKS, TABLE_CAPACITY, TABLE_TIMEOUT, TABLE_TOLD = range(5)
TABLE_STEPS, TABLE_LEFT_OUT, TABLE_FINISHED, TABLE_CLOCK, TABLE_SHARED = range(5, 10)

SHARED_VERDICT = 0  # words of a rank's shared memory; the first rank's verdict counts
SHARED_FAILURE = 1
SHARED_DETAILS = 16  # (capacity,), then from an even word on the slots

LATE, DIFFERS, DECLARED = 1, 2, 3  # kinds of failure; a host that declares one describes it elsewhere
FIELDS = ("batch size or num_samples", "seed", "offset", "temperature")  # from the highest bits of a parameter hash
MAX_RANKS = 1 << 10  # that a verdict can name

STEP_BITS = 15  # of tag 0
DETAIL_BITS = 16  # of each field
HASH_FACTORS = 0x9E3779B9, 0x85EBCA6B, 0xC2B2AE35, 0x27D4EB2F


class Shard(NamedTuple):
    """The part of the vocabulary that a call samples, and where its winners go."""

    first_token: int = 0  # id of the weight's first row
    exchange: int = TOKENS  # TOKENS: token ids of this shard alone; PACKED: packed winners; else a table's address


WHOLE = Shard()


class Verdict(NamedTuple):
    """The reason why a group failed."""

    kind: int  # LATE, DIFFERS or DECLARED
    straggler: int  # rank
    reporter: int  # rank
    fields: int = 0  # four bits, see FIELDS
    ahead: int = 0  # how far the straggler's step number is above the reporter's, clamped to -32 ... 31
    step: int = 0  # the reporter's, modulo 2**31

    def word(self) -> int:
        """Returns the verdict as it is in memory, above 0."""
        low = self.kind | self.straggler << 2 | self.reporter << 12 | self.fields << 22 | (self.ahead & 63) << 26
        return self.step << 32 | low

    @classmethod
    def of(cls, word: int) -> "Verdict":
        """Returns the verdict of a word."""
        return cls(
            kind=word & 3,
            straggler=word >> 2 & MAX_RANKS - 1,
            reporter=word >> 12 & MAX_RANKS - 1,
            fields=word >> 22 & 15,
            ahead=((word >> 26 & 63) ^ 32) - 32,
            step=word >> 32,
        )


def table_words(rank: int, capacity: int, nanoseconds: int, told: int, shared: Sequence[int]) -> list[int]:
    """Returns a new table. ``told`` and ``shared``, by rank, are addresses."""
    return [rank, len(shared), capacity, nanoseconds, told, *[0] * (TABLE_SHARED - TABLE_STEPS), *shared]


def shared_words(ranks: int, capacity: int) -> int:
    """Returns how many int64 each rank shares with the others."""
    return first_slot(capacity) + 2 * ranks * capacity * 2


def first_slot(capacity: int) -> int:
    """Returns the index of the first slot among these words."""
    return SHARED_DETAILS + capacity + (capacity & 1)


def pack(
    score: Tensor,  # (n,) float32: the best
    token: Tensor,  # (n,) int64: its lowest id
    finite: Tensor,  # (n,) bool: some score is finite
) -> Tensor:
    """Returns (n,) int64 packed winners."""
    bits = (score + 0.0).view(torch.int32).to(torch.int64)  # + 0.0: -0.0 and 0.0 tie
    ordered = (bits ^ torch.where(bits < 0, NO_TOKEN, 0)) + 2**31
    key = ordered << 31 | token ^ NO_TOKEN
    key = torch.where(score.isneginf(), NO_FINITE, torch.where(finite, key, key | NO_FINITE))
    return torch.where(score.isnan(), NAN, key)


def tokens_of(
    winners: Tensor,  # (ranks, n) int64
) -> Tensor:
    """Returns (n,) int64 token ids; -1 where a score was NaN or none was finite."""
    best = (winners & NAN).amax(dim=0)
    defined = (winners.amax(dim=0) > 0) & (best != NAN)
    return torch.where(defined, best & NO_TOKEN ^ NO_TOKEN, -1)
