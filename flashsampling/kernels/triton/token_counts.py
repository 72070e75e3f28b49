"""Advances the counts of requests' tokens (``token_counts.TokenCounts``) in one small launch; torch needs ten
operations."""

import triton.language as tl
from torch import Tensor

from .jit import jit

_TOKENS = 32  # of a row at once


@jit(
    do_not_specialize=["vocab_size", "count", "ids_stride", "apart", "counts_stride", "seen_stride"],
    do_not_specialize_on_alignment=["token_ids", "rows", "counts", "seen"],
)
def count_kernel(
    token_ids,  # (B, n) of any integers
    ids_stride,
    apart,  # elements between neighbours in a row
    rows,  # (B,) int64, rows of counts; None: the first B
    counts,  # (rows, V) int32, changed in place
    counts_stride: tl.int64,
    seen,  # (rows, groups) uint8, changed in place: the nonzero-count mask
    seen_stride: tl.int64,
    vocab_size,
    count,  # n
    GROUP: tl.constexpr,  # tokens per byte of ``seen``
    TOKENS: tl.constexpr,
):
    """Counts a row of ids per program. Ids out of range are ignored; a token, and a row, may occur several times."""
    program = tl.program_id(0).to(tl.int64)
    row = program
    if rows is not None:
        row = tl.load(rows + program)
    for first in range(0, count, TOKENS):
        place = (first + tl.arange(0, TOKENS)).to(tl.int64)
        token = tl.load(token_ids + program * ids_stride + place * apart, mask=place < count, other=-1).to(tl.int64)
        there = (place < count) & (token >= 0) & (token < vocab_size)
        tl.atomic_add(counts + row * counts_stride + token, 1, mask=there, sem="relaxed")
        tl.store(seen + row * seen_stride + token // GROUP, 1, mask=there)


def count(
    counts: Tensor,  # (rows, V) int32
    seen: Tensor,  # (rows, groups) uint8
    token_ids: Tensor,  # (B, n) integers
    rows: Tensor | None,  # (B,) int64; None: the first B
    group: int,
) -> None:
    """Adds token ids to counts (``TokenCounts.add``). The arguments are checked."""
    batch, length = token_ids.shape
    if batch and length:
        count_kernel[(batch,)](
            token_ids, *token_ids.stride(), rows, counts, counts.stride(0), seen, seen.stride(0), counts.shape[1],
            length, GROUP=group, TOKENS=_TOKENS, num_warps=1,
        )  # fmt: skip
