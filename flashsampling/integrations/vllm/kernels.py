"""Two small Triton kernels between vLLM's state and the step: counts of a batch's rows, and rows without a token.

As torch operations the first would be six passes over (B, V), the second four launches.
"""

import triton
import triton.language as tl


@triton.jit
def counts_kernel(
    output_counts,  # (slots, V) int32: how often a token is in the output
    output_stride: tl.int64,
    prompt_mask,  # (slots, ceil(V / 32)) int32: bit t & 31 of word t >> 5: token t is in the prompt
    prompt_stride: tl.int64,
    slots,  # (B,) int32
    repetition,  # (B,) float32, as the following
    frequency,
    presence,
    out,  # (B, V) int32; rows without a penalty are left as they are
    out_stride: tl.int64,
    vocab_size,
    BLOCK: tl.constexpr,
):
    """A row of ``token_counts``: a program per row and block of tokens."""
    row = tl.program_id(0).to(tl.int64)
    penalised = tl.load(repetition + row) != 1.0
    penalised |= tl.load(frequency + row) != 0.0
    penalised |= tl.load(presence + row) != 0.0
    if penalised:
        slot = tl.load(slots + row).to(tl.int64)
        token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        live = token < vocab_size
        counts = tl.load(output_counts + slot * output_stride + token, mask=live, other=0)
        word = tl.load(prompt_mask + slot * prompt_stride + (token >> 5), mask=live, other=0)
        tl.store(out + row * out_stride + token, counts | (((word >> (token & 31)) & 1) << 31), mask=live)


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
