"""Handles draft chains on the device in two small launches: parameters of every position, and which drafts match.

    expand  for each row of hidden states its request, and that request's temperature, seed, offset and other numbers
    match   the target's tokens at the positions of a request against its drafts, up to the first that differs
    hash    with several ranks: a hash of the drafts, which must agree on all ranks

``speculative.drafts`` and ``speculative.acceptance`` do the same in a dozen torch operations, also for trees; compilers
see those, and tests compare this module with them. Whatever the tensors hold, no index is out of range.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ....exchange_protocol import NO_TOKEN
from ....inputs import row_argument
from ....sampling_params import ROW_FIELDS
from ....speculative.drafts import HASH_FACTORS, HASH_OF_MOST, HASH_OF_ROOM
from ..filtered.transforms import pointer_to
from ..fused.config import next_power_of_2
from ..jit import jit

_ROWS = 128  # per program of ``expand_kernel``
_REQUESTS = 8  # per program of ``match_kernel``
_HASHED = 128  # requests at once, in ``hash_kernel``
_FIRST, _SECOND, _THIRD = (tl.constexpr(factor) for factor in HASH_FACTORS)
_ROOM, _MOST, _LAST_ID = tl.constexpr(HASH_OF_ROOM), tl.constexpr(HASH_OF_MOST), tl.constexpr(NO_TOKEN)

# addresses of a value per request, or per row, of 4 or 8 bytes each; 0: a scalar, which is not copied
Addresses = NamedTuple("Addresses", [(name, int) for name in ("temperature", "seed", *ROW_FIELDS)])  # type: ignore[misc]


@jit
def _owner(bounds, batch, rows):
    """Returns, for each row of hidden states, its request and its distance from the request's first row: a binary
    search."""
    owner = tl.zeros(rows.shape, tl.int64)
    left = tl.zeros(rows.shape, tl.int64) + batch  # requests that may begin at or before the row
    while tl.max(left, axis=0) > 1:
        half = left // 2
        begins = tl.load(bounds + owner + half) + owner + half
        owner = tl.where(begins <= rows, owner + half, owner)
        left = left - half
    return owner, rows - (tl.load(bounds + owner) + owner)


@jit
def _draft_span(bounds, request, n, total):
    """Returns the first draft of requests among ``total``, and their draft count: 0 if ``total`` is 0, whatever the
    bounds say."""
    if bounds is None:
        first = request * n
        count = tl.zeros(request.shape, tl.int64) + n
    else:
        first = tl.load(bounds + request)
        count = tl.minimum(tl.load(bounds + request + 1) - first, n)
    return first, tl.where(total > 0, count, 0)


@jit
def _copy_values(of_requests, of_rows, wide, request, rows, live):
    """Copies values per request to their rows, in words of 4 bytes. All loads precede the stores. Bit i of ``wide``:
    values of 8 bytes."""
    words = ()
    for i in tl.static_range(len(of_requests)):
        size = tl.full(rows.shape, 1 + ((wide >> i) & 1), tl.int64)  # in words; masks are compared blocks
        copied = live & (tl.full(rows.shape, of_requests[i], tl.int64) != 0)
        source = pointer_to(of_requests[i], tl.int32) + request * size
        words = words + (tl.load(source, mask=copied), tl.load(source + 1, mask=copied & (size == 2)))
    for i in tl.static_range(len(of_rows)):
        size = tl.full(rows.shape, 1 + ((wide >> i) & 1), tl.int64)
        copied = live & (tl.full(rows.shape, of_rows[i], tl.int64) != 0)
        target = pointer_to(of_rows[i], tl.int32) + rows * size
        tl.store(target, words[2 * i], mask=copied)
        tl.store(target + 1, words[2 * i + 1], mask=copied & (size == 2))


@jit(
    structs={"of_requests": Addresses, "of_rows": Addresses},
    do_not_specialize=["offset_value", "positions", "batch", "n", "wide"],
    do_not_specialize_on_alignment=["bounds", "offset", "offsets", "requests"],
)
def expand_kernel(
    bounds,  # (B + 1,) int64; None: n drafts each
    offset,  # (B,) int64; None: offset_value
    offset_value: tl.int64,
    offsets,  # (R,), out
    requests,  # (R,) int64, out; None: not wanted
    positions: tl.int64,
    batch: tl.int64,
    n: tl.int64,
    of_requests,
    of_rows,  # out
    wide: tl.int64,  # bit i: field i has values of 8 bytes
    ROWS: tl.constexpr,
):
    """Copies each request's parameters to all of its positions. Grid: (blocks of rows,)."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = rows < positions
    if bounds is None:
        request = tl.minimum(rows // (n + 1), batch - 1)
        node = rows % (n + 1)
    else:
        request, node = _owner(bounds, batch, rows)
        node = tl.minimum(tl.maximum(node, 0), n)
    first = offset_value
    if offset is not None:
        first = tl.load(offset + request)
    tl.store(offsets + rows, first + node, mask=live)
    if requests is not None:
        tl.store(requests + rows, request, mask=live)
    _copy_values(of_requests, of_rows, wide, request, rows, live)


@jit(
    do_not_specialize=["total", "batch", "n"],
    do_not_specialize_on_alignment=["bounds", "drafts", "tokens", "out", "num_accepted", "num_emitted"],
)
def match_kernel(
    bounds,  # (B + 1,) int64; None: n drafts each
    drafts,  # (total,) int64
    tokens,  # (total + B,) int64: what the target drew
    out,  # (B, n + 1) int64, out
    num_accepted,  # (B,) int64, out
    num_emitted,  # (B,) int64, out
    total: tl.int64,
    batch: tl.int64,
    n: tl.int64,
    REQUESTS: tl.constexpr,
    NODES: tl.constexpr,  # n + 1, up to a power of two
):
    """Compares the target's tokens with the drafts. Grid: (blocks of requests,)."""
    request = tl.program_id(0).to(tl.int64) * REQUESTS + tl.arange(0, REQUESTS)
    there = request < batch
    request = tl.minimum(request, batch - 1)
    node = tl.arange(0, NODES).to(tl.int64)[None, :]
    first, count = _draft_span(bounds, request, n, total)
    place = first[:, None] + node
    row = tl.minimum(tl.maximum(place + request[:, None], 0), total + batch - 1)
    token = tl.load(tokens + row)
    has_draft = node < count[:, None]
    place = tl.minimum(tl.maximum(place, 0), total - 1)
    draft = tl.load(drafts + place, mask=has_draft, other=-1)
    holds = has_draft & (draft >= 0) & (draft == token)
    accepted = tl.min(tl.where(holds, NODES, node), axis=1)  # node 0 to n: the first that does not match
    accepted = tl.minimum(accepted, n)
    emitted = (node <= accepted[:, None]) & (node <= n)
    tl.store(out + request[:, None] * (n + 1) + node, tl.where(emitted, token, -1), mask=there[:, None] & (node <= n))
    last = tl.sum(tl.where(node == accepted[:, None], token, 0), axis=1)
    tl.store(num_accepted + request, accepted, mask=there)
    tl.store(num_emitted + request, accepted + (last >= 0).to(tl.int64), mask=there)


@jit
def _odd_number(place):
    """Mixes an index into an odd number, as ``drafts._odd_number`` does."""
    number = place * _FIRST + _THIRD
    number = (number ^ (number >> 30)) * _SECOND
    number = (number ^ (number >> 27)) * _THIRD
    return (number ^ (number >> 31)) | 1


@jit(
    do_not_specialize=["total", "batch", "n"],
    do_not_specialize_on_alignment=["bounds", "drafts", "out"],
)
def hash_kernel(
    bounds,  # (B + 1,) int64; None: n drafts each
    drafts,  # (total,) int64
    out,  # () int64, out
    total: tl.int64,
    batch: tl.int64,
    n: tl.int64,
    REQUESTS: tl.constexpr,
):
    """Hashes draft chains as ``drafts.Drafts.hash`` does. Grid: (1,)."""
    hashed = tl.zeros((REQUESTS,), tl.int64)
    for start in range(0, batch, REQUESTS):
        request = start + tl.arange(0, REQUESTS).to(tl.int64)
        follows = request < batch
        request = tl.minimum(request, batch - 1)
        first, count = _draft_span(bounds, request, n, total)
        room = count
        if bounds is not None:
            room = tl.load(bounds + request + 1) - first
        of_shape = room * _odd_number(request << 32 | _ROOM) + (n + 1) * _odd_number(request << 32 | _MOST)
        hashed += tl.where(follows, of_shape, 0)
        for node in range(0, n):
            place = tl.minimum(tl.maximum(first + node, 0), total - 1)
            draft = tl.load(drafts + place, mask=follows & (node < count), other=-1)
            follows = follows & (draft >= 0)
            hashed += tl.where(follows, (tl.minimum(draft, _LAST_ID) + 1) * _odd_number(request << 32 | node), 0)
    tl.store(out, tl.sum(hashed, axis=0))


def hashed(
    token_ids: Tensor,  # (B, n) or (N,) int64, contiguous
    bounds: Tensor | None,  # (B + 1,) int64
    batch: int,
    n: int,
) -> Tensor:
    """Returns the draft hash, () int64 (``drafts.Drafts.hash``)."""
    out = torch.empty((), dtype=torch.int64, device=token_ids.device)
    hash_kernel[(1,)](bounds, token_ids, out, token_ids.numel(), batch, n, REQUESTS=_HASHED, num_warps=4)
    return out


def expand(
    bounds: Tensor | None,  # (B + 1,) int64
    batch: int,
    n: int,
    temperature: Tensor | float,  # (B,)
    seed: Tensor | int,  # (B,)
    offset: Tensor | int,  # (B,)
    numbers: Sequence[Any],  # of ``sampling_params.ROW_FIELDS``: each a contiguous tensor (B,), or a scalar
    device: torch.device,
    *,
    positions: int,
    with_requests: bool,
) -> tuple[Tensor | float, Tensor | int, Tensor, list[Any], Tensor | None]:
    """Returns temperature, seed, offset and numbers of every position, (R,) or a scalar, and the positions' requests if
    wanted."""
    offsets, requests = torch.empty((2, positions), dtype=torch.int64, device=device)
    of_requests = [temperature, seed, *numbers]
    of_rows = [
        torch.empty(positions, dtype=value.dtype, device=device) if isinstance(value, Tensor) else value
        for value in of_requests
    ]
    sizes = [value.element_size() if isinstance(value, Tensor) else 0 for value in of_requests]
    expand_kernel[(triton.cdiv(positions, _ROWS),)](
        bounds, offset if isinstance(offset, Tensor) else None, 0 if isinstance(offset, Tensor) else offset, offsets,
        requests if with_requests else None, positions, batch, n,
        Addresses(*(row_argument(value)[0] for value in of_requests)),
        Addresses(*(row_argument(value)[0] for value in of_rows)),
        sum(1 << i for i, size in enumerate(sizes) if size == 8), ROWS=_ROWS, num_warps=4,
    )  # fmt: skip
    return of_rows[0], of_rows[1], offsets, of_rows[2:], requests if with_requests else None


def match(
    token_ids: Tensor,  # (B, n) or (N,) int64, contiguous
    bounds: Tensor | None,  # (B + 1,) int64
    batch: int,
    n: int,
    tokens: Tensor,  # (R,) int64: what the target drew
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns tokens (B, n + 1), the number of matched drafts (B,), and the number of tokens (B,)."""
    out = torch.empty((batch, n + 1), dtype=torch.int64, device=tokens.device)
    num_accepted, num_emitted = torch.empty((2, batch), dtype=torch.int64, device=tokens.device)
    match_kernel[(triton.cdiv(batch, _REQUESTS),)](
        bounds, token_ids, tokens, out, num_accepted, num_emitted, token_ids.numel(), batch, n, REQUESTS=_REQUESTS,
        NODES=next_power_of_2(n + 1), num_warps=1,
    )  # fmt: skip
    return out, num_accepted, num_emitted
