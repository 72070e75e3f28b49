"""A small Triton kernel behind an engine's step: rows without a token, which as torch operations would be four launches."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["batch"], do_not_specialize_on_alignment=["token_ids"])
def settle_kernel(
    token_ids,  # (B,) int64
    undefined,  # (1,) int64
    batch,
    BLOCK: tl.constexpr,
):
    """Makes 0 of -1 and counts how many there were."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = row < batch
    lost = tl.load(token_ids + row, mask=live, other=0) < 0
    tl.store(token_ids + row, tl.zeros((BLOCK,), tl.int64), mask=live & lost)
    number = tl.sum(lost.to(tl.int64), axis=0)
    if number > 0:
        tl.atomic_add(undefined, number)
