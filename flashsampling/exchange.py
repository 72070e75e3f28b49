"""What crosses ranks under tensor parallelism: one int64 per row, draw and rank, and the peer-to-peer protocol that carries it.

Packed winners
    An int64 that says of a shard's scores in a row all that the other ranks need:

        NAN                     some score is NaN
        (score, id) > 0         the best score, +inf included, and the lowest id that reaches it; some score here is finite
        NO_FINITE | (+inf, id)  as before, but no score here is finite
        NO_FINITE               no score here is above -inf; an empty shard says this

    (score, id) is the key that all kernels order by: the order-preserving bits of the score, then 31 bits of complemented id,
    so the maximum is the best score's lowest id. Two ranks' winners combine by the maximum of what lies below NO_FINITE, and
    by whether any of them is positive; nothing depends on how a rank tiles its shard. 0 is no packed winner: it means "not
    here yet".

Peer to peer (transport ``p2p``)
    Every rank has in symmetric memory ``received``, int64 (2, ranks, capacity), zero at first: two buffers of a slot per rank,
    row and draw. A row and draw counts how often it was used; its uses take the two buffers in turn. In use number u the
    thread that finishes a row, in the sampling kernel itself,

        1  stores the packed winner into slot [u % 2, own rank, row] of every rank, its own included
        2  waits until every rank's slot [u % 2, rank, row] of its own memory is not 0
        3  sets these slots to 0, and the use count to u + 1

    The winner is its own flag: eight aligned bytes arrive whole, so nothing can be seen before it.

    edge                                               order
    clearing in use u -> the peers' stores of u + 2    the clearing thread's launch ends before use u + 1 begins (one stream);
                                                       fence.acq_rel.sys, st.relaxed.sys of use u + 1 -> ld.relaxed.sys,
                                                       fence.acq_rel.sys of the peer, which stores for u + 2 only after
                                                       that (Triton: atom.exch.release.sys -> atom.add.acquire.sys)
    a peer's store of use u -> the wait                the same 8 bytes: st.relaxed.sys -> ld.relaxed.sys

    So no rank overwrites what another still reads, however far it runs ahead: it gets two uses ahead of nobody. One
    ``TensorParallel`` is used by one step at a time, in the same order on all ranks, like any collective.

    A wait ends after a time-out: the thread writes 1 + the rank it waited for into the first word of ``failed`` (host memory)
    and of ``state``, and its row gets -1. Waits that start after that do not wait at all, so what is still queued drains.

Table, int64 in device memory, by whose address a kernel finds all this:

    0 rank   1 ranks   2 capacity   3 time-out, ns   4 address of failed   5 address of state   6 ... each rank's received

``state``: int64 (1 + capacity,), the failure, then the use counts.
"""

from typing import NamedTuple

import torch
from torch import Tensor

NO_TOKEN = 2**31 - 1
NAN = 2**63 - 1
NO_FINITE = -(2**63)

TOKENS = 0  # values of Shard.exchange that are no address
PACKED = 1

TABLE_RANK, TABLE_RANKS, TABLE_CAPACITY, TABLE_TIMEOUT, TABLE_FAILED, TABLE_STATE, TABLE_RECEIVED = range(7)


class Shard(NamedTuple):
    """Which part of the vocabulary a call samples, and what becomes of the winners."""

    first_token: int = 0  # id of the weight's first row
    exchange: int = TOKENS  # TOKENS: token ids of this shard alone; PACKED: packed winners; else a table's address


WHOLE = Shard()


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
