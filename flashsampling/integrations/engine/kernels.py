"""A Triton kernel that replaces tokens of -1 after a step. Torch operations would be four launches."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["batch"], do_not_specialize_on_alignment=["token_ids"])
def sanitize_kernel(
    token_ids,  # (B,) int64
    sanitize_token_ids,  # (B,) int64
    ones,  # (B,) int32
    undefined,  # (1,) int64
    batch,
    BLOCK: tl.constexpr,
):
    """Copies tokens, with 0 for -1, adds the number of -1 to ``undefined``, and writes a 1 for every row."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = row < batch
    ids = tl.load(token_ids + row, mask=live, other=0)
    tl.store(sanitize_token_ids + row, tl.maximum(ids, 0), mask=live)
    tl.store(ones + row, tl.full((BLOCK,), 1, tl.int32), mask=live)
    number = tl.sum((ids < 0).to(tl.int64), axis=0)
    if number > 0:
        tl.atomic_add(undefined, number)
