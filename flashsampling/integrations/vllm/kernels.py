"""A Triton kernel that makes token counts of a batch's rows from vLLM's state. Torch operations would pass six times
over (B, V)."""

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
    seen,  # (B, m) uint8, of all tokens: 0 where none of 16 tokens has a count, of rows without a penalty everywhere
    seen_stride: tl.int64,
    count,  # n
    BLOCK: tl.constexpr,  # a multiple of 16
):
    """Writes rows of ``token_counts``: a program per row and block of tokens. Blocks begin at multiples of 16
    tokens."""
    row = tl.program_id(0).to(tl.int64)
    penalised = tl.load(repetition + row) != 1.0
    penalised |= tl.load(frequency + row) != 0.0
    penalised |= tl.load(presence + row) != 0.0
    first_token = tl.program_id(1) * BLOCK
    group = first_token // 16 + tl.arange(0, BLOCK // 16)
    some = tl.zeros((BLOCK // 16,), tl.uint8)
    if penalised:
        slot = tl.load(slots + row).to(tl.int64)
        token = first_token + tl.arange(0, BLOCK)
        live = token < count
        counts = tl.load(output_counts + slot * output_stride + token, mask=live, other=0)
        word = tl.load(prompt_mask + slot * prompt_stride + (token >> 5), mask=live, other=0)
        counts |= ((word >> (token & 31)) & 1) << 31
        tl.store(out + row * out_stride + token, counts, mask=live)
        some = tl.max((tl.reshape(counts, (BLOCK // 16, 16)) != 0).to(tl.int32), axis=1).to(tl.uint8)
    tl.store(seen + row * seen_stride + group, some, mask=group * 16 < count)
