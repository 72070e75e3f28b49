"""What crosses ranks under tensor parallelism: packed winners, and the peer-to-peer protocol that carries them.

Packed winners
    An int64 per row and draw that says of a shard's scores all that the other ranks need:

        NAN                     some score is NaN
        (score, id) > 0         the best score, +inf included, and the lowest id that reaches it; some score here is finite
        NO_FINITE | (+inf, id)  as before, but no score here is finite
        NO_FINITE               no score here is above -inf; an empty shard says this

    (score, id) is the key that all kernels order by: the order-preserving bits of the score, then 31 bits of complemented id,
    so the maximum is the best score's lowest id. Two ranks' winners combine by the maximum of what lies below NO_FINITE, and
    by whether any of them is positive; nothing depends on how a rank tiles its shard.

Peer to peer (transport ``p2p``)
    What a rank sends of a row and draw is a message of two words of eight bytes, each half of the winner above a tag:

        winner >> 32 | tag 0        tag 0: a set bit, 15 bits of the step's number, 16 bits of the call's details
        winner & 2**32 - 1 | tag 1  tag 1: 31 bits of a hash of the number and the details, and a set bit

    Details are 16 bits of a hash of each of (batch size, draws), seed, offset and temperature: what a rank called with. A
    step's number is how many launches the group has made on this rank, counted on the device so that graph replays count, and
    how many calls ended without one (``TABLE_LEFT_OUT``, in order of the stream). Eight aligned bytes arrive whole, a word of
    an empty slot is 0 and a message's is not: each word is its own flag, and their order does not matter.

    Every rank has in memory that all ranks map (``SHARED_*``): a word ``failure``; the details of its own rows; and slots,
    (2, ranks, capacity) of two words, empty at first. Launch number s uses buffer s % 2. The threads that finish a row, in the
    sampling kernel itself,

        1  read ``failure``; where it is not 0, or the group closed, all tokens are -1, and nothing is sent
        2  store the row's details, then its message into slot [s % 2, own rank, row] of every rank, its own included
        3  wait until both words of every rank's slot [s % 2, rank, row] of its own memory are there, or else, looked at now
           and then, ``failure`` is not 0 or the time is up, which runs from before 2
        4  compare tags: the token is that of the winners if all are this rank's own, else -1
        5  empty these slots, if all of the row's are there and agree; the launch's last thread counts the step

    and whoever finds a rank missing or different decides for all: by compare-and-swap on the word ``verdict`` in the FIRST
    rank's memory, whose value (his, or that of whoever was earlier) it then stores into ``failure`` of every rank and into its
    own host's memory ``told``. Rows of that launch are -1 then, all of them. What differs it reads out of the other's details.

    States. normal: ``failure`` = 0. failed: not 0, for good; from its next launch on a failed rank sends nothing. closed: the
    table's ranks are 0, for good; nothing of another rank's memory is touched. normal -> failed -> closed, normal -> closed. A
    replay of a graph finds the state that is.

    edge                                               order
    emptying in step s -> the peers' stores of s + 2   the emptying thread's launch ends before step s + 1 begins (one stream);
                                                       fence.acq_rel.sys, st.relaxed.sys of step s + 1 -> ld.acquire.sys of
                                                       the peer, whose launch ends before it stores for s + 2
                                                       (Triton: atom.exch.release.sys -> atom.add.acquire.sys)
    a row's details -> whoever judges its message      as above: stored before the fence that comes before the message
    a peer's store of step s -> the wait               the same 8 bytes: st.relaxed.sys -> ld.acquire.sys
    verdict -> failure -> a wait, told                 the value says all; nothing is read because of it

    Why no stale winner is accepted. While no rank has failed, a rank stores for its launch s + 1 only after it had every rank's
    message of its launch s, so two ranks' counts differ by one at most, and a slot [s % 2, r, row] gets nothing between its
    emptying at s and rank r's launch s + 2 (first edge): what is found there in launch s was stored in launch s. Of ranks that
    call with other batches some slots stay full; but row 0's tags differ then, and the group fails in that launch. A rank that
    has failed sends nothing from its next launch on, so that launch is completed by no rank: all fail in it or before. What was
    stored until then is of a launch whose tags agree, or it is refused. Step numbers wrap, hashes can collide (2**-31 a row);
    neither is needed for messages of one rank's past, only to tell apart calls that differ. That ``failure`` is spread, and
    looked at while waiting, is for speed alone: without it the others would wait until their time is up.
    ``tests/tensor_parallel/test_protocol.py`` walks through every interleaving of small groups, and shows what each
    rule here is needed for.

    What a request asks for takes several rounds (``tensor_parallel/filtered_sampling``), each a launch of its own and
    a step of this
    protocol, with words in the place of packed winners. A word has the details of a row, and tags into which a hash of the
    request is mixed: so a round agrees with none of another request, nor with a plain step, and its details then do not differ.
    Where the sampling kernel does all of a request, or there are drafts to be matched, a round of one word, the hash itself,
    comes before its launch.

    One ``TensorParallel`` is used by one step at a time, in the same order on all ranks, like any collective.

Table, int64 in device memory that outlives the group (a captured graph may hold it), by whose address a kernel finds all this:

    0 rank   1 ranks, 0 once closed   2 capacity   3 time-out, ns   4 address of told   5 launches   6 calls without a launch
    7 finished blocks of rows   8 a clock   9 ... address of each rank's shared memory

The first failure, in one word (``Verdict``): kind, culprit, reporter, what differs, how many steps the culprit is ahead, the
reporter's step.
"""

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

LATE, DIFFERS, DECLARED = 1, 2, 3  # kinds of failure; a host that declares one says elsewhere what it is
FIELDS = (
    "batch size or num_samples",
    "seed",
    "offset",
    "temperature",
)  # from the highest bits of details, and of a verdict's
MAX_RANKS = 1 << 10  # a verdict's

STEP_BITS = 15  # of tag 0
DETAIL_BITS = 16  # of each field
HASH_FACTORS = 0x9E3779B9, 0x85EBCA6B, 0xC2B2AE35, 0x27D4EB2F


class Shard(NamedTuple):
    """Which part of the vocabulary a call samples, and what becomes of the winners."""

    first_token: int = 0  # id of the weight's first row
    exchange: int = TOKENS  # TOKENS: token ids of this shard alone; PACKED: packed winners; else a table's address


WHOLE = Shard()


class Verdict(NamedTuple):
    """Why a group failed."""

    kind: int  # LATE, DIFFERS or DECLARED
    straggler: int  # rank
    reporter: int  # rank
    fields: int = 0  # four bits, see FIELDS
    ahead: int = 0  # steps that the culprit's number is above the reporter's, -32 to 31: at the ends, or more
    step: int = 0  # the reporter's, modulo 2**31

    def word(self) -> int:
        """As it lies in memory, above 0."""
        low = self.kind | self.straggler << 2 | self.reporter << 12 | self.fields << 22 | (self.ahead & 63) << 26
        return self.step << 32 | low

    @classmethod
    def of(cls, word: int) -> "Verdict":
        """The verdict that ``word`` made."""
        return cls(
            kind=word & 3,
            straggler=word >> 2 & MAX_RANKS - 1,
            reporter=word >> 12 & MAX_RANKS - 1,
            fields=word >> 22 & 15,
            ahead=((word >> 26 & 63) ^ 32) - 32,
            step=word >> 32,
        )


def table_words(rank: int, capacity: int, nanoseconds: int, told: int, shared: Sequence[int]) -> list[int]:
    """A table at first. ``told`` and ``shared``, by rank, are addresses."""
    return [rank, len(shared), capacity, nanoseconds, told, *[0] * (TABLE_SHARED - TABLE_STEPS), *shared]


def shared_words(ranks: int, capacity: int) -> int:
    """How many int64 each rank shares with the others."""
    return first_slot(capacity) + 2 * ranks * capacity * 2


def first_slot(capacity: int) -> int:
    """At which of these words the slots begin."""
    return SHARED_DETAILS + capacity + (capacity & 1)


def pack(
    score: Tensor,  # (n,) float32: the best
    token: Tensor,  # (n,) int64: its lowest id
    finite: Tensor,  # (n,) bool: some score is finite
) -> Tensor:
    """(n,) int64 packed winners."""
    bits = (score + 0.0).view(torch.int32).to(torch.int64)  # + 0.0: -0.0 and 0.0 tie
    ordered = (bits ^ torch.where(bits < 0, NO_TOKEN, 0)) + 2**31
    key = ordered << 31 | token ^ NO_TOKEN
    key = torch.where(score.isneginf(), NO_FINITE, torch.where(finite, key, key | NO_FINITE))
    return torch.where(score.isnan(), NAN, key)


def tokens_of(
    winners: Tensor,  # (ranks, n) int64
) -> Tensor:
    """(n,) int64 token ids; -1 where a score was NaN or none was finite."""
    best = (winners & NAN).amax(dim=0)
    defined = (winners.amax(dim=0) > 0) & (best != NAN)
    return torch.where(defined, best & NO_TOKEN ^ NO_TOKEN, -1)
