"""A small Triton kernel between vLLM's state and the step: counts of a batch's rows. As torch operations it would be six passes
over (B, V).
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
    out,  # (B, n) int32, of n tokens; rows without a penalty are left as they are
    out_stride: tl.int64,
    first_token,
    count,  # n
    BLOCK: tl.constexpr,
):
    """A row of ``token_counts``: a program per row and block of tokens."""
    row = tl.program_id(0).to(tl.int64)
    penalised = tl.load(repetition + row) != 1.0
    penalised |= tl.load(frequency + row) != 0.0
    penalised |= tl.load(presence + row) != 0.0
    if penalised:
        slot = tl.load(slots + row).to(tl.int64)
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        live = column < count
        token = first_token + column
        counts = tl.load(output_counts + slot * output_stride + token, mask=live, other=0)
        word = tl.load(prompt_mask + slot * prompt_stride + (token >> 5), mask=live, other=0)
        tl.store(out + row * out_stride + column, counts | (((word >> (token & 31)) & 1) << 31), mask=live)
