"""Samples draft chains by rejection, from logits in memory and the recorded filters of their rows
(``inputs.FilteredLogits``).

It supports all sampling parameters, in three launches:

    accept   a program per draft: its p, from its processed logit and the row's record by
             ``filtered.filtered_sample_kernel``, against a coin times q
    recover  programs per request: at the first draft that is not accepted, blocks of max(p - q, 0) with noise
    finish   a program per request: the best of its blocks or, after drafts that are all accepted, the token drawn there

An id that is no token is no draft: the chain ends before it.

``reference/rejection`` computes in float64 over all rows; these kernels compute in float32 over one row of each
request. Leviathan, Kalman and Matias, "Fast Inference from Transformers via Speculative Decoding", ICML 2023.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ....inputs import SampleInputs
from ....noise import Stream
from ....outputs import FilteredLogits
from ..filtered.draw import is_kept, load_record
from ..filtered.order import column_tokens, lane_offset, mass_of, mass_scale
from ..filtered.transforms import Rows, load_f32, load_i64
from ..fused.config import next_power_of_2
from ..fused.noise import REFINEMENT_BIT, minus_gumbel_refined, philox_words
from ..fused.packed_argmax import NAN_KEY, NO_TOKEN, pack_key
from ..jit import jit

_COIN = tl.constexpr(int(Stream.ACCEPTANCE_COIN) << 24)
_RECOVERY = tl.constexpr(int(Stream.RECOVERY) << 24)


@jit
def _probability(x, token, record, scale):
    """Returns p of tokens with processed logits x; NaN in an undefined row."""
    mass, kept_mass = mass_of(x, record.top, scale), record.kept_mass
    kept = is_kept(record, x, mass, token, scale)
    p = tl.where(kept & (x != float("-inf")), mass / kept_mass, 0.0)
    p = tl.where(record.only_token >= 0, (token == record.only_token).to(tl.float32), p)
    return tl.where(kept_mass != kept_mass, kept_mass, p)


@jit
def _draft_probability(draft_probs, probs_stride, place, token, there):
    """Loads the draft probabilities of tokens, float32: negative ones as 0, and NaN as NaN."""
    q = tl.load(draft_probs + place * probs_stride + token, mask=there, other=0.0).to(tl.float32)
    return tl.where(q < 0.0, 0.0, q)


@jit
def _locate_draft(bounds, request, node, n, total, batch):
    """Returns, for a request's draft, the row of the position before it, its index among all drafts, and whether it
    exists."""
    if bounds is None:
        first = request * n
        there = node < n
    else:
        first = tl.load(bounds + request)
        there = node < tl.minimum(tl.load(bounds + request + 1) - first, tl.where(total > 0, n, 0))
    row = tl.minimum(tl.maximum(first + request + node, 0), total + batch - 1)
    return row, tl.maximum(tl.minimum(first + node, total - 1), 0), there


@jit
def _accepts(logits, logits_stride, rows, limits, masses, draft_probs, probs_stride, row, place, token, holds):
    """Returns whether a row accepts the draft after it, int32: 0 where it ``holds`` none."""
    token = tl.where(holds, token, 0).to(tl.int32)
    x = tl.load(logits + row * logits_stride + token).to(tl.float32)
    record = load_record(limits, masses, row)
    scale = mass_scale(load_f32(rows.temperature_at, rows.temperature, row))
    p = _probability(x, token, record, scale)
    q = tl.full((), 1.0, tl.float32)
    if draft_probs is not None:
        q = _draft_probability(draft_probs, probs_stride, place, token, holds)
    seed = load_i64(rows.seed_at, rows.seed, row)
    offset = load_i64(rows.offset_at, rows.offset, row)
    word, _, _, _ = philox_words(
        tl.zeros((1,), tl.uint32), tl.full((1,), _COIN, tl.uint32), offset.to(tl.uint32), (offset >> 32).to(tl.uint32),
        seed.to(tl.uint32), (seed >> 32).to(tl.uint32),
    )  # fmt: skip
    coin = (word.to(tl.float64) + 0.5) * 2.3283064365386963e-10
    coin = tl.max(coin, axis=0)
    return (holds & (coin * q.to(tl.float64) < p.to(tl.float64))).to(tl.int32)


@jit(
    structs={"rows": Rows},
    do_not_specialize=["vocab_size", "total", "batch", "n"],
    do_not_specialize_on_alignment=["logits", "bounds", "drafts", "draft_probs", "accepted", "limits", "masses"],
)
def accept_kernel(
    logits,  # (R, V) processed logits of all positions
    logits_stride: tl.int64,
    vocab_size: tl.int32,
    rows,
    limits,
    masses,
    bounds,  # (B + 1,) int64; None: n drafts each
    drafts,  # (total,) int64
    draft_probs,  # (total, V or more); None: each draft was certain
    probs_stride,
    accepted,  # (B, n) int32, out: 1 if the draft is accepted
    total: tl.int64,
    batch: tl.int64,
    n: tl.int64,
):
    """Decides which drafts are accepted, each by itself. Grid: (B * n,)."""
    request = tl.program_id(0).to(tl.int64) // n
    node = tl.program_id(0).to(tl.int64) % n
    row, place, there = _locate_draft(bounds, request, node, n, total, batch)
    token = tl.load(drafts + place, mask=there, other=-1)
    holds = there & (token >= 0) & (token < vocab_size)
    is_accepted = _accepts(
        logits, logits_stride, rows, limits, masses, draft_probs, probs_stride, row, place, token, holds
    )
    tl.store(accepted + request * n + node, is_accepted)


@jit
def _count_accepted(accepted, request, n, NODES: tl.constexpr):
    """Returns how many of a request's drafts are accepted, up to the first that is not."""
    node = tl.arange(0, NODES)
    bits = tl.load(accepted + request * n + node, mask=node < n, other=0)
    return tl.min(tl.where(bits != 0, NODES, node), axis=0).to(tl.int64)


@jit
def _best_of_block(
    logits, logits_stride, vocab_size, rows, limits, masses, draft_probs, probs_stride, row, place, refused, block,
    GROUPS: tl.constexpr,
):  # fmt: skip
    """Returns the best keys of a block of a row's tokens: of max(p - q, 0), and of p."""
    BLOCK: tl.constexpr = 4 * GROUPS
    record = load_record(limits, masses, row)
    scale = mass_scale(load_f32(rows.temperature_at, rows.temperature, row))
    seed = load_i64(rows.seed_at, rows.seed, row)
    offset = load_i64(rows.offset_at, rows.offset, row)
    key_lo, key_hi = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    offset_lo, offset_hi = offset.to(tl.uint32), (offset >> 32).to(tl.uint32)
    first = block * BLOCK
    column = column_tokens(GROUPS)
    ids = ()
    live = ()
    processed = ()
    for lane in tl.static_range(4):
        token = first + lane_offset(lane) + column
        inside = token < vocab_size
        x = tl.load(logits + row * logits_stride + token, mask=inside, other=float("-inf"))
        ids = ids + (token,)
        live = live + (inside,)
        processed = processed + (x.to(tl.float32),)
    group = (first // 4 + tl.arange(0, GROUPS)).to(tl.uint32)
    draw = tl.full((GROUPS,), _RECOVERY, tl.uint32)
    words = philox_words(group, draw, offset_lo, offset_hi, key_lo, key_hi)
    tail0, tail1, tail2, tail3 = words  # unused where no word is 0
    is_zero = (words[0] == 0) | (words[1] == 0) | (words[2] == 0) | (words[3] == 0)
    if tl.max(is_zero.to(tl.int32), axis=0) != 0:
        tail0, tail1, tail2, tail3 = philox_words(group, draw | REFINEMENT_BIT, offset_lo, offset_hi, key_lo, key_hi)
    tails = (tail0, tail1, tail2, tail3)
    best = tl.zeros((GROUPS,), tl.int64)
    best_of_all = tl.zeros((GROUPS,), tl.int64)
    for lane in tl.static_range(4):
        token = ids[lane]
        p = _probability(processed[lane], token, record, scale)
        if draft_probs is None:
            left = tl.where(token == refused, 0.0, p)
        else:
            left = p - _draft_probability(draft_probs, probs_stride, place, token, live[lane])
        noise = minus_gumbel_refined(words[lane], tails[lane])
        is_left = live[lane] & ((left > 0.0) | (left != left))
        best = tl.maximum(best, tl.where(is_left, pack_key(tl.log2(left) - noise, token), 0))
        has = live[lane] & ((p > 0.0) | (p != p))
        best_of_all = tl.maximum(best_of_all, tl.where(has, pack_key(tl.log2(p) - noise, token), 0))
    return tl.max(best, axis=0), tl.max(best_of_all, axis=0)


@jit(
    structs={"rows": Rows},
    do_not_specialize=["vocab_size", "total", "batch", "n", "blocks"],
    do_not_specialize_on_alignment=[
        "logits",
        "bounds",
        "drafts",
        "draft_probs",
        "accepted",
        "slots",
        "limits",
        "masses",
    ],
)
def recover_kernel(
    logits,  # as for ``accept_kernel``
    logits_stride: tl.int64,
    vocab_size: tl.int32,
    rows,
    limits,
    masses,
    bounds,
    drafts,
    draft_probs,
    probs_stride,
    accepted,  # (B, n) int32
    total: tl.int64,
    batch: tl.int64,
    n: tl.int64,
    slots,  # (B, blocks, 2) int64, out: the best of max(p - q, 0), and of p
    blocks: tl.int32,
    NODES: tl.constexpr,  # n, up to a power of two
    GROUPS: tl.constexpr,  # Philox groups of a block
):
    """Draws from max(p - q, 0), and from p, at a request's first rejected draft. Grid: (B * blocks,)."""
    request = (tl.program_id(0) // blocks).to(tl.int64)
    block = tl.program_id(0) % blocks
    node = _count_accepted(accepted, request, n, NODES)
    row, place, there = _locate_draft(bounds, request, node, n, total, batch)
    refused = tl.load(drafts + place, mask=there, other=-1)
    if (refused >= 0) & (refused < vocab_size):  # else no draft was rejected, and the token is drawn
        best, best_of_all = _best_of_block(
            logits, logits_stride, vocab_size, rows, limits, masses, draft_probs, probs_stride, row, place, refused,
            block, GROUPS,
        )  # fmt: skip
        out = slots + (request * blocks + block) * 2
        tl.store(out, best)
        tl.store(out + 1, best_of_all)


@jit
def _best_token(keys, live):
    """Returns the token of a row's best block: of max(p - q, 0), or of p where the former is 0 everywhere."""
    best = tl.max(tl.load(keys, mask=live, other=0), axis=0)
    if best == 0:
        best = tl.max(tl.load(keys + 1, mask=live, other=0), axis=0)
    return tl.where((best == 0) | (best == NAN_KEY), -1, (best & NO_TOKEN) ^ NO_TOKEN)


@jit(
    do_not_specialize=["vocab_size", "total", "batch", "n", "blocks"],
    do_not_specialize_on_alignment=[
        "bounds",
        "drafts",
        "drawn",
        "accepted",
        "slots",
        "out",
        "num_accepted",
        "num_emitted",
    ],
)
def finish_kernel(
    vocab_size: tl.int32,
    bounds,
    drafts,
    drawn,  # (total + B,) int64: what ``sample`` draws at every position
    accepted,
    slots,
    out,  # (B, n + 1) int64, out
    num_accepted,  # (B,) int64, out
    num_emitted,  # (B,) int64, out
    total: tl.int64,
    batch: tl.int64,
    n: tl.int64,
    blocks: tl.int32,
    NODES: tl.constexpr,
    COLUMNS: tl.constexpr,  # n + 1, up to a power of two
    BLOCKS: tl.constexpr,  # blocks, up to a power of two
):
    """Writes each request's tokens and counts. Grid: (B,)."""
    request = tl.program_id(0).to(tl.int64)
    count = _count_accepted(accepted, request, n, NODES)
    row, place, there = _locate_draft(bounds, request, count, n, total, batch)
    refused = tl.load(drafts + place, mask=there, other=-1)
    token = tl.load(drawn + row)
    if (refused >= 0) & (refused < vocab_size):
        block = tl.arange(0, BLOCKS)
        token = _best_token(slots + (request * blocks + block) * 2, block < blocks)
    node = tl.arange(0, COLUMNS).to(tl.int64)
    _, places, _ = _locate_draft(bounds, request, node, n, total, batch)
    held = tl.load(drafts + places, mask=(node < count) & (node < n), other=-1)
    held = tl.where(node == count, token, held)
    tl.store(out + request * (n + 1) + node, tl.where(node <= count, held, -1), mask=node <= n)
    tl.store(num_accepted + request, count)
    tl.store(num_emitted + request, count + (token >= 0).to(tl.int64))


_GROUPS = 512  # per program of ``recover_kernel``


def run(
    step: SampleInputs,  # all positions, R = N + B
    recorded: FilteredLogits,  # of these positions
    token_ids: Tensor,  # (B, n) or (N,) int64, contiguous
    bounds: Tensor | None,  # (B + 1,) int64
    batch: int,
    n: int,
    draft_probs: Tensor | None,  # (N, V or more); None: each draft was certain
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns tokens (B, n + 1), accepted drafts (B,) and tokens (B,) per request, in three launches; in one if n =
    0."""
    device = recorded.ids.device
    blocks = triton.cdiv(step.vocab_size, 4 * _GROUPS)
    slots = torch.empty((batch, blocks, 2), dtype=torch.int64, device=device)
    accepted = torch.empty((batch, n), dtype=torch.int32, device=device)
    out = torch.empty((batch, n + 1), dtype=torch.int64, device=device)
    num_accepted, num_emitted = torch.empty((2, batch), dtype=torch.int64, device=device)
    if draft_probs is not None and draft_probs.stride(1) != 1:
        draft_probs = draft_probs.contiguous()
    common = (
        recorded.logits, recorded.logits.stride(0), step.vocab_size, Rows(*step.row_arguments()), recorded.limits,
        recorded.masses, bounds, token_ids, draft_probs, 0 if draft_probs is None else draft_probs.stride(0), accepted,
        token_ids.numel(), batch, n,
    )  # fmt: skip
    nodes = next_power_of_2(max(n, 1))
    if n > 0:
        accept_kernel[(batch * n,)](*common, num_warps=1)
        recover_kernel[(batch * blocks,)](*common, slots, blocks, NODES=nodes, GROUPS=_GROUPS, num_warps=4)
    finish_kernel[(batch,)](
        step.vocab_size, bounds, token_ids, recorded.ids, accepted, slots, out, num_accepted, num_emitted,
        token_ids.numel(), batch, n, blocks, NODES=nodes, COLUMNS=next_power_of_2(n + 1),
        BLOCKS=next_power_of_2(blocks), num_warps=1,
    )  # fmt: skip
    return out, num_accepted, num_emitted


# -- over ranks: every row by itself

_TOKEN_BITS = tl.constexpr(31)


@jit(
    structs={"rows": Rows},
    do_not_specialize=["vocab_size"],
    do_not_specialize_on_alignment=["logits", "drafts", "places", "draft_probs", "accepted", "limits", "masses"],
)
def accept_rows_kernel(
    logits,  # (R, V) processed logits
    logits_stride: tl.int64,
    vocab_size: tl.int32,
    rows,
    limits,
    masses,
    drafts,  # (R,) int64: the draft after each row
    places,  # (R,) int64: its row of draft_probs
    draft_probs,  # (N, V or more); None: each draft was certain
    probs_stride,
    accepted,  # (R,) int32, out
):
    """Decides whether each row accepts its draft. Grid: (R,)."""
    row = tl.program_id(0).to(tl.int64)
    token = tl.load(drafts + row)
    holds = (token >= 0) & (token < vocab_size)
    is_accepted = _accepts(
        logits, logits_stride, rows, limits, masses, draft_probs, probs_stride, row, tl.load(places + row), token, holds
    )
    tl.store(accepted + row, is_accepted)


@jit(
    structs={"rows": Rows},
    do_not_specialize=["vocab_size", "blocks"],
    do_not_specialize_on_alignment=[
        "logits", "drafts", "places", "draft_probs", "accepted", "slots", "limits", "masses",
    ],
)  # fmt: skip
def recover_rows_kernel(
    logits,  # as for ``accept_rows_kernel``
    logits_stride: tl.int64,
    vocab_size: tl.int32,
    rows,
    limits,
    masses,
    drafts,
    places,
    draft_probs,
    probs_stride,
    accepted,  # (R,) int32
    slots,  # (R, blocks, 2) int64, out: the best of max(p - q, 0), and of p, of rows that refuse their draft
    blocks: tl.int32,
    GROUPS: tl.constexpr,
):
    """Draws from max(p - q, 0), and from p, in rows that refuse their draft. Grid: (R * blocks,)."""
    row = (tl.program_id(0) // blocks).to(tl.int64)
    block = tl.program_id(0) % blocks
    refused = tl.load(drafts + row)
    if (refused >= 0) & (refused < vocab_size) & (tl.load(accepted + row) == 0):
        best, best_of_all = _best_of_block(
            logits, logits_stride, vocab_size, rows, limits, masses, draft_probs, probs_stride, row,
            tl.load(places + row), refused, block, GROUPS,
        )  # fmt: skip
        out = slots + (row * blocks + block) * 2
        tl.store(out, best)
        tl.store(out + 1, best_of_all)


@jit(
    do_not_specialize=["vocab_size", "blocks"],
    do_not_specialize_on_alignment=["drafts", "drawn", "accepted", "slots", "out"],
)
def pack_rows_kernel(
    vocab_size: tl.int32,
    drafts,
    drawn,  # (R,) int64: what ``sample`` draws in every row
    accepted,
    slots,
    out,  # (R,) int64, out
    blocks: tl.int32,
    BLOCKS: tl.constexpr,  # blocks, up to a power of two
):
    """Writes each row's word (``tensor_parallel.rejection.pack``). Grid: (R,)."""
    row = tl.program_id(0).to(tl.int64)
    refused = tl.load(drafts + row)
    is_accepted = tl.load(accepted + row).to(tl.int64)
    recovered = tl.full((), -1, tl.int64)
    if (refused >= 0) & (refused < vocab_size) & (is_accepted == 0):
        block = tl.arange(0, BLOCKS)
        recovered = _best_token(slots + (row * blocks + block) * 2, block < blocks)
    word = (tl.load(drawn + row) + 1) | (recovered + 1) << _TOKEN_BITS | is_accepted << (2 * _TOKEN_BITS)
    tl.store(out + row, word)


def verify_rows(
    step: SampleInputs,
    recorded: FilteredLogits,
    token_ids: Tensor,  # (R,) int64: the draft after each row; -1: none
    places: Tensor,  # (R,) int64
    draft_probs: Tensor | None,
) -> Tensor:
    """Returns the rows' words, (R,) int64, in three launches."""
    rows, device = len(recorded.ids), recorded.ids.device
    blocks = triton.cdiv(step.vocab_size, 4 * _GROUPS)
    slots = torch.empty((rows, blocks, 2), dtype=torch.int64, device=device)
    accepted = torch.empty(rows, dtype=torch.int32, device=device)
    out = torch.empty(rows, dtype=torch.int64, device=device)
    if draft_probs is not None and draft_probs.stride(1) != 1:
        draft_probs = draft_probs.contiguous()
    common = (
        recorded.logits, recorded.logits.stride(0), step.vocab_size, Rows(*step.row_arguments()), recorded.limits,
        recorded.masses, token_ids, places, draft_probs, 0 if draft_probs is None else draft_probs.stride(0), accepted,
    )  # fmt: skip
    accept_rows_kernel[(rows,)](*common, num_warps=1)
    recover_rows_kernel[(rows * blocks,)](*common, slots, blocks, GROUPS=_GROUPS, num_warps=4)
    pack_rows_kernel[(rows,)](
        step.vocab_size, token_ids, recorded.ids, accepted, slots, out, blocks, BLOCKS=next_power_of_2(blocks),
        num_warps=1,
    )  # fmt: skip
    return out
