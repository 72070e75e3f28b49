"""``tensor_parallel/cutoffs`` by kernels (``limits_kernels``): the same functions, and no tensor as large as a shard's
logits, which
each of them reads at most once.

    survey     the highest place, whether anything is finite; and the chunks' highest keys, by which those that follow
               pass over chunks that have nothing for them
    top        the first k tokens: those of as many chunks, whose highest places are highest
    few        where top-k and top-p end among all ranks' first tokens, in rows whose k is not above those
    floor      of another top-k: the key that as many chunks reach, from which on it is searched for
    mass       of what is kept
    nucleus    of a top-p: likewise, the key from which on a token has mass enough to be its last
    histogram  of an interval of keys that halves some times a digit: how many tokens, or how much mass, are in each
    part digit      the part in which what is wanted is reached; after the last digit, the limit
    least      the lowest key that min-p keeps

A search has as many rounds as 32 bits have digits. But its interval begins as narrow as floor and top are, so that the
last ones have nothing to do as a rule, nor has any where all rows are settled by their first tokens: ``Collective`` is
told so, on the device.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ....inputs import SampleInputs
from ....reference.logit_transforms import HIGHEST, LOWEST, column, keys_of, places_of
from ..fused.config import next_power_of_2
from .cutoff_kernels import (
    RANKS,
    STATE,
    few_kernel,
    floor_kernel,
    histogram_kernel,
    least_kernel,
    mass_kernel,
    nucleus_kernel,
    open_kernel,
    radix_pass_kernel,
    row_max_kernel,
    top_kernel,
)

if TYPE_CHECKING:
    from ....tensor_parallel.cutoffs import Collective, Scale, Shards

TILE = 2048  # tokens of a program that has some of a row's
CHUNK = 64  # tokens that have a highest key
_FEW = 8  # chunks that a program looks at in place of all of a tile's
_MOST = 1 << 20  # tokens whose chunks one program compares
_BINS = 256
_FIRST = 128  # tokens of a rank that settle a row whose top-k is not more
_SOME = 4  # times as many places as there is room for: a row's that may be among the first
_SLOTS = 32, 128  # places of a row: for log-probabilities and most values of top-k; for all that ``of_few`` takes
_PROGRAMS = 2048  # that share the rows of a search: many have nothing to do, and that is done as soon
_WARPS = 8


def blocks_of(logits: Tensor) -> int:
    """Programs that share a row."""
    return max(-(-logits.shape[1] // TILE), 1)


def slots_of(count: int) -> int:
    """Room for so many places of a row: of few sizes, so that hardly a request has a kernel of its own compiled."""
    return next((slots for slots in _SLOTS if count <= slots), next_power_of_2(count))


def _stride(values: Tensor) -> int:
    """Of a ``filters.column``, whose number is every row's."""
    return values.stride(0) if len(values) > 1 else 0


def highest(local: SampleInputs, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Implements the function of ``tensor_parallel.cutoffs``: one launch, and zeros."""
    batch, columns = logits.shape
    blocks, mask = blocks_of(logits), local.params.token_mask
    words = torch.zeros((batch, 2), dtype=torch.int64, device=logits.device)
    keys = torch.empty((batch, -(-columns // CHUNK)), dtype=torch.int32, device=logits.device)
    row_max_kernel[(batch * blocks,)](
        logits,
        logits.stride(0),
        columns,
        local.rows().temperature,
        mask,
        0 if mask is None else mask.stride(0),
        words,
        keys,
        local.shard.first_token,
        keys.shape[1],
        blocks,
        TILE=TILE,
        CHUNK=CHUNK,
        num_warps=_WARPS,
    )
    return words, keys


def first_places(
    logits: Tensor,
    keys: Tensor,  # of chunks
    count: int,
    first_token: int,
) -> Tensor:
    """(B, count) int64: those of the first tokens, ``LOWEST`` where there are not so many."""
    places = torch.full((len(logits), count), LOWEST, dtype=torch.int64, device=logits.device)
    _put_first_places(logits, keys, places, first_token)
    return places


def _put_first_places(logits: Tensor, keys: Tensor, places: Tensor, first_token: int) -> None:
    """Writes ``first_places`` to ``places``, (B, count), which holds ``LOWEST``."""
    (batch, columns), device, count = logits.shape, logits.device, places.shape[1]
    if columns > _MOST:
        ids = torch.arange(first_token, first_token + columns, device=device)
        places.copy_(torch.stack([places_of(keys_of(row), ids).topk(count).values for row in logits]))
        return
    chunks, slots = keys.shape[1], slots_of(count)
    top_kernel[(batch,)](
        logits,
        logits.stride(0),
        columns,
        keys,
        torch.empty((batch, count), dtype=torch.int32, device=device),
        torch.empty((batch, _SOME * slots), dtype=torch.int32, device=device),
        places,
        places.stride(0),
        first_token,
        chunks,
        count,
        CHUNKS=next_power_of_2(max(chunks, 1)),
        SLOTS=slots,
        CHUNK=CHUNK,
        SOME=_SOME * slots,
        num_warps=_WARPS,
    )


def _settled(
    theirs: Tensor,  # (ranks, B, words) int64, which begin with the ranks' first places
    count: int,
    top_k: Tensor | None,  # (B, 1) or (1, 1) int64; None: count
    top_p: Tensor | float,
    scale: "Scale",
    vocab_size: int,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Limits (B,) int64. Of a ``top_k`` also which rows have theirs, (B,) int32, and in how many others there is a
    top-p."""
    ranks, batch, words = theirs.shape
    p, device = column(top_p, theirs.device), theirs.device
    limit = torch.empty(batch, dtype=torch.int64, device=device)
    settled = None if top_k is None else torch.empty(batch, dtype=torch.int32, device=device)
    live = None if top_k is None else torch.zeros(1, dtype=torch.int32, device=device)
    few_kernel[(batch,)](
        theirs,
        words,
        top_k,
        0 if top_k is None else _stride(top_k),
        p,
        _stride(p),
        scale.top,
        scale.temperature,
        limit,
        settled,
        live,
        batch,
        ranks,
        count,
        vocab_size,
        scale.unit,
        PLACES=next_power_of_2(ranks * slots_of(count)),
        num_warps=_WARPS,
    )
    return limit, settled, live


def of_few(
    meet: "Collective",
    logits: Tensor,
    keys: Tensor,
    top_k: int,
    top_p: Tensor | float,
    scale: "Scale",
    shards: "Shards",
) -> Tensor:
    """Implements the function of ``tensor_parallel.cutoffs``: two launches."""
    return _settled(meet(first_places(logits, keys, top_k, shards.first)), top_k, None, top_p, scale, 0)[0]


def of_top_k_and_p(
    meet: "Collective",
    logits: Tensor,
    keys: Tensor,
    top_k: Tensor | int,
    top_p: Tensor | float,
    scale: "Scale",
    vocab_size: int,
    shards: "Shards",
) -> Tensor:
    """(B,) int64 limits of top-k and, over what it keeps, of top-p: as ``of_few`` has them of rows whose k is not above
    128; of others as the two that follow."""
    k = column(top_k, logits.device, torch.int64).long()
    words = torch.full((len(logits), _FIRST + 1), LOWEST, dtype=torch.int64, device=logits.device)
    _put_first_places(logits, keys, words[:, :_FIRST], shards.first)
    _put_floors(keys, logits.shape[1], k, words[:, _FIRST], _FIRST, vocab_size)
    theirs = meet(words)
    limit, settled, live = _settled(theirs, _FIRST, k, top_p, scale, vocab_size)
    _search_of_top_k(meet, logits, keys, k, theirs[:, :, _FIRST], limit, _FIRST, scale, vocab_size, shards)
    if isinstance(top_p, Tensor) or top_p < 1.0:
        limit = _of_top_p(meet, logits, keys, scale, top_p, limit, settled, live, vocab_size, shards)
    return limit


def _of_three(theirs: Tensor, shards: "Shards") -> Tensor:
    """(3, B, n) of (ranks, B, n), of more ranks than have flags: the sum of those before this one, its own, and the
    others'."""
    own = theirs[shards.rank]
    before = sum((theirs[rank] for rank in shards.before()), torch.zeros_like(own))
    return torch.stack([before, own, theirs.sum(dim=0) - before - own])


def _begun(batch: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the initial arguments of ``_search``: states, lowest sort keys, and, zeroed, the number of rows in which
    each digit is searched for."""
    state = torch.empty((batch, STATE), dtype=torch.int64, device=device)
    lowest = torch.empty(batch, dtype=torch.int64, device=device)
    return (
        state,
        lowest,
        torch.zeros(32 + 1, dtype=torch.int32, device=device),
    )  # of a bit each, at most, and behind them


def _search(
    meet: "Collective",
    logits: Tensor,
    keys: Tensor,  # of chunks
    limit: Tensor,  # (B,) int64, in and out: it rises to what is found
    state: Tensor,
    lowest: Tensor,
    live: Tensor,
    scale: "Scale",
    shards: "Shards",
    masses: bool,
) -> None:
    """Two launches a digit, and zeros."""
    (batch, columns), device = logits.shape, logits.device
    width, tiles = shards.digit_width(batch), blocks_of(logits)
    of_program = min(max(batch * tiles // _PROGRAMS, 1), tiles)
    blocks = -(-tiles // of_program)
    rank, before = shards.rank, sum(1 << rank for rank in shards.before())
    rounds = -(-32 // width)
    histograms = torch.zeros((rounds, batch, 1 << width), dtype=torch.int64, device=device)
    for nth, amounts in enumerate(histograms):
        searched = live[nth : nth + 1]
        histogram_kernel[(batch * blocks,)](
            searched,
            logits,
            logits.stride(0),
            columns,
            keys,
            state,
            lowest,
            scale.top,
            scale.temperature,
            amounts,
            shards.first,
            scale.unit,
            width,
            keys.shape[1],
            of_program,
            blocks,
            MASSES=masses,
            **_shapes(),
            num_warps=_WARPS,
        )
        theirs = meet(amounts, searched)
        if len(theirs) > 2 * RANKS:
            theirs, rank, before = _of_three(theirs, shards), 1, 1
        radix_pass_kernel[(batch,)](
            searched,
            live[nth + 1 : nth + 2],
            theirs,
            state,
            limit,
            logits,
            logits.stride(0),
            columns,
            scale.top,
            scale.temperature,
            shards.first,
            scale.unit,
            width,
            batch,
            len(theirs),
            rank,
            before & (1 << RANKS) - 1,
            before >> RANKS,
            MASSES=masses,
            BINS=_BINS,
            TILE=TILE,
            num_warps=_WARPS,
        )


def _shapes() -> dict[str, int]:
    """Of kernels that look at some chunks."""
    return {"TILE": TILE, "CHUNK": CHUNK, "FEW": min(_FEW, TILE // CHUNK // 4)}


def of_top_k(
    meet: "Collective",
    logits: Tensor,
    keys: Tensor,
    top_k: Tensor | int,
    scale: "Scale",
    vocab_size: int,
    shards: "Shards",
) -> Tensor:
    """Implements ``tensor_parallel.cutoffs``: a launch more than the search, a round of floors, and a launch."""
    k = column(top_k, logits.device, torch.int64).long()
    limit, floors = torch.full((2, len(logits)), LOWEST, dtype=torch.int64, device=logits.device)
    _put_floors(keys, logits.shape[1], k, floors, 0, vocab_size)
    _search_of_top_k(meet, logits, keys, k, meet(floors[:, None])[:, :, 0], limit, 0, scale, vocab_size, shards)
    return limit


def _put_floors(
    keys: Tensor,
    columns: int,
    k: Tensor,  # (B, 1) or (1, 1) int64
    floors: Tensor,  # (B,) int64, of any stride, out
    few: int,
    vocab_size: int,
) -> None:
    """Of rows whose k is above ``few``: the first k tokens of all ranks are not below what k tokens of one reach."""
    batch, chunks = keys.shape
    if columns > _MOST:
        chunks = 0
    floor_kernel[(batch,)](
        keys,
        k,
        _stride(k),
        floors,
        floors.stride(0),
        few,
        vocab_size,
        chunks,
        CHUNKS=next_power_of_2(max(chunks, 1)),
        num_warps=_WARPS,
    )


def _search_of_top_k(
    meet: "Collective",
    logits: Tensor,
    keys: Tensor,
    k: Tensor,  # (B, 1) or (1, 1) int64
    floors: Tensor,  # (ranks, B) int64, of any stride
    limit: Tensor,  # (B,) int64, in and out
    few: int,
    scale: "Scale",
    vocab_size: int,
    shards: "Shards",
) -> None:
    """Of rows whose k is above ``few``."""
    ranks, batch = floors.shape
    state, lowest, live = _begun(batch, logits.device)
    open_kernel[(batch,)](
        floors,
        floors.stride(1),
        k,
        _stride(k),
        scale.top,
        lowest,
        state,
        live,
        few,
        vocab_size,
        batch,
        ranks,
        num_warps=1,
    )
    _search(meet, logits, keys, limit, state, lowest, live, scale, shards, False)


def of_top_p(
    meet: "Collective",
    logits: Tensor,
    keys: Tensor,
    scale: "Scale",
    top_p: Tensor | float,
    limit: Tensor | None,
    vocab_size: int,
    shards: "Shards",
) -> Tensor:
    """Implements the function of ``tensor_parallel.cutoffs``: two launches more than the search."""
    whole = (
        torch.full((len(logits),), LOWEST, dtype=torch.int64, device=logits.device) if limit is None else limit.clone()
    )
    return _of_top_p(meet, logits, keys, scale, top_p, whole, None, None, vocab_size, shards)


def _of_top_p(
    meet: "Collective",
    logits: Tensor,
    keys: Tensor,
    scale: "Scale",
    top_p: Tensor | float,
    limit: Tensor,  # (B,) int64, in and out
    settled: Tensor | None,
    wanted: Tensor | None,  # (1,) int32: 0 if there is no row to be searched
    vocab_size: int,
    shards: "Shards",
) -> Tensor:
    """Handles rows that are not settled."""
    p, batch = column(top_p, logits.device), len(logits)
    theirs = meet(mass_of(logits, limit, scale, shards.first, keys, p, settled), wanted)
    state, lowest, live = _begun(batch, logits.device)
    nucleus_kernel[(batch,)](
        theirs,
        p,
        _stride(p),
        settled,
        scale.top,
        scale.temperature,
        limit,
        lowest,
        state,
        live,
        scale.unit,
        vocab_size,
        batch,
        len(theirs),
        num_warps=1,
    )
    _search(meet, logits, keys, limit, state, lowest, live, scale, shards, True)
    return limit


def of_min_p(logits: Tensor, keys: Tensor, scale: "Scale", min_p: Tensor | float) -> Tensor:
    """Implements the function of ``tensor_parallel.cutoffs``: one launch."""
    batch, columns = logits.shape
    ratio, blocks = column(min_p, logits.device), blocks_of(logits)
    limit = torch.full((batch,), HIGHEST, dtype=torch.int64, device=logits.device)
    least_kernel[(batch * blocks,)](
        logits,
        logits.stride(0),
        columns,
        keys,
        ratio,
        _stride(ratio),
        scale.top,
        scale.temperature,
        limit,
        keys.shape[1],
        blocks,
        **_shapes(),
        num_warps=_WARPS,
    )
    return limit


def mass_of(
    logits: Tensor,
    limit: Tensor,
    scale: "Scale",
    first_token: int,
    keys: Tensor | None = None,
    p: Tensor | None = None,  # (B, 1) or (1, 1): 0 for rows where it is off
    settled: Tensor | None = None,  # (B,) int32: likewise for those that are
) -> Tensor:
    """Implements the function of ``tensor_parallel.cutoffs``: one launch, and zeros."""
    batch, columns = logits.shape
    blocks = blocks_of(logits)
    out = torch.zeros((batch, 1), dtype=torch.int64, device=logits.device)
    mass_kernel[(batch * blocks,)](
        logits,
        logits.stride(0),
        columns,
        keys,
        limit,
        p,
        0 if p is None else _stride(p),
        settled,
        scale.top,
        scale.temperature,
        out,
        first_token,
        scale.unit,
        0 if keys is None else keys.shape[1],
        blocks,
        TILE=TILE,
        CHUNK=CHUNK,
        num_warps=_WARPS,
    )
    return out
