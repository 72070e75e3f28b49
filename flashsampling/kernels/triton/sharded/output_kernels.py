"""Kernels of ``outputs``: compute the outputs of a step whose rows lie on several ranks."""

import triton.language as tl

from ..constant import Constant
from ..filtered.order import LOG2E, NO_LOGIT, key_of, value_of
from ..fused.packed_argmax import NAN_KEY, NO_TOKEN
from ..jit import jit
from .cutoff_kernels import LOWEST_PLACE, ORDER, relative

_LOW = Constant(0xFFFFFFFF)


@jit
def _log_of_sum(logarithms):
    """float64: of numbers that have these logarithms (n,), whose exponentials are of their type; NaN where one is, as
    ``torch.logsumexp``."""
    most = tl.max(tl.where(logarithms != logarithms, float("-inf"), logarithms), axis=0)
    most = tl.where(tl.abs(most) == float("inf"), 0.0, most)
    below = logarithms - most
    if logarithms.dtype == tl.float32:
        share = tl.exp2(below * LOG2E).to(tl.float64)
    else:
        share = tl.exp(below)
    return most.to(tl.float64) + tl.log(tl.sum(share, axis=0))


@jit
def _float32(bits):
    """float32 of the low half of int64."""
    return bits.to(tl.int32).to(tl.float32, bitcast=True)


@jit
def _bits(x):
    """int64, from 0 up, of float32."""
    return x.to(tl.int32, bitcast=True).to(tl.int64) & _LOW


@jit(
    do_not_specialize=["batch", "ranks", "top_p_stride", "min_p_stride"],
    do_not_specialize_on_alignment=["theirs_ptr", "top_p_ptr", "min_p_ptr", "places_ptr", "tops_ptr", "defined_ptr"],
)
def first_kernel(
    theirs_ptr,  # (ranks, B, 2) int64
    top_p_ptr,  # (B,) float32
    top_p_stride: tl.int64,  # below 0: it is a number, or not asked for
    min_p_ptr,  # likewise
    min_p_stride: tl.int64,
    places_ptr,  # (B,) int64, out
    tops_ptr,  # (B,) float32, out
    defined_ptr,  # (B,) int8, out
    batch: tl.int32,
    ranks: tl.int32,
    BLOCK: tl.constexpr,
):
    """``tensor_parallel.outputs.first``. Grid: (ceil(B / BLOCK),)."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = row < batch
    best = tl.full((BLOCK,), -1, tl.int64)
    finite = tl.zeros((BLOCK,), tl.int64)
    for rank in range(ranks):
        at = theirs_ptr + (batch.to(tl.int64) * rank + row) * 2
        best = tl.maximum(best, tl.load(at, mask=live, other=0))
        finite = tl.maximum(finite, tl.load(at + 1, mask=live, other=0))
    defined = (finite > 0) & (best != NAN_KEY)
    if top_p_stride >= 0:  # not what is compiled for: requests differ in it
        p = tl.load(top_p_ptr + row * top_p_stride, mask=live, other=0.0)
        defined = defined & (p == p)
    if min_p_stride >= 0:  # not what is compiled for: requests differ in it
        p = tl.load(min_p_ptr + row * min_p_stride, mask=live, other=0.0)
        defined = defined & (p == p)
    place = best - (ORDER << 31)
    tl.store(places_ptr + row, place, mask=live)
    tl.store(tops_ptr + row, value_of((place >> 31).to(tl.int32)), mask=live)
    tl.store(defined_ptr + row, defined.to(tl.int8), mask=live)


@jit(do_not_specialize=["columns", "chunks", "blocks"])
def raw_kernel(
    logits,  # (B, n) float32
    logits_stride,
    columns: tl.int32,
    sums_ptr,  # (B, blocks) float64, out: log-sum-exps
    keys_ptr,  # (B, chunks) int32, out: the chunks' highest keys; None if nobody asks
    chunks: tl.int32,
    blocks: tl.int32,
    TILE: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Grid: (blocks * B,)."""
    row = (tl.program_id(0) // blocks).to(tl.int64)
    block = tl.program_id(0) % blocks
    at = block * TILE + tl.arange(0, TILE)
    live = at < columns
    x = tl.load(logits + row * logits_stride + at, mask=live, other=float("-inf"))
    if keys_ptr is not None:
        chunk = block * (TILE // CHUNK) + tl.arange(0, TILE // CHUNK)
        highest = tl.max(tl.reshape(tl.where(live, key_of(x), NO_LOGIT), (TILE // CHUNK, CHUNK)), axis=1)
        tl.store(keys_ptr + row * chunks + chunk, highest, mask=chunk < chunks)
    tl.store(
        sums_ptr + row * blocks + block, _log_of_sum(x)
    )  # of float64 exponentials it would take longer than the head


@jit(
    do_not_specialize=["columns", "first_token", "num_samples", "top", "given", "width", "blocks"],
    do_not_specialize_on_alignment=["raw", "processed", "winners_ptr", "mass_ptr", "given_ptr"],
)
def words_kernel(
    raw,  # (B, n) float32
    processed,  # (B, n) float32
    logits_stride,
    columns: tl.int32,
    winners_ptr,  # (B, num_samples) int64
    mass_ptr,  # (B,) int64; None: the tokens' log-probabilities are not asked for
    sums_ptr,  # (B, blocks) float64
    top_ptr,  # (B, top) int64; None: not asked for
    given_ptr,  # (B, given) int64: of the shard, -1 where it is not there; None: not asked for
    out_ptr,  # (B, width) int64, out
    first_token: tl.int32,
    num_samples: tl.int32,
    top: tl.int32,
    given: tl.int32,
    width: tl.int32,
    blocks: tl.int32,
    BLOCKS: tl.constexpr,  # at least ``blocks``
    SOME: tl.constexpr,
):
    """``tensor_parallel.outputs.words`` of what has a log-sum-exp. Grid: (B,)."""
    row = tl.program_id(0).to(tl.int64)
    out = out_ptr + row * width
    of_raw, of_processed = raw + row * logits_stride, processed + row * logits_stride
    some = tl.arange(0, SOME)
    for start in range(0, num_samples, SOME):
        draw = start + some
        there = draw < num_samples
        key = tl.load(winners_ptr + row * num_samples + draw, mask=there, other=0)
        tl.store(out + draw, key, mask=there)
        if mass_ptr is not None:
            own = ((key & NO_TOKEN) ^ NO_TOKEN) - first_token
            own = tl.maximum(tl.minimum(own, columns - 1), 0)
            inside = there & (own < columns)  # an empty shard has no column 0
            both = _bits(tl.load(of_raw + own, mask=inside, other=0.0)) << 32
            both = both | _bits(tl.load(of_processed + own, mask=inside, other=0.0))
            tl.store(out + num_samples + draw, both, mask=there)
    at = out + num_samples
    if mass_ptr is not None:
        at += num_samples
        tl.store(at, tl.load(mass_ptr + row))
        at += 1
    block = tl.arange(0, BLOCKS)
    sums = tl.load(sums_ptr + row * blocks + block, mask=block < blocks, other=float("-inf"))
    tl.store(at, _log_of_sum(sums).to(tl.int64, bitcast=True))
    at += 1
    if top_ptr is not None:
        for start in range(0, top, SOME):
            there = start + some < top
            tl.store(at + start + some, tl.load(top_ptr + row * top + start + some, mask=there, other=0), mask=there)
        at += top
    if given_ptr is not None:
        for start in range(0, given, SOME):
            there = start + some < given
            token = tl.load(given_ptr + row * given + start + some, mask=there, other=-1)
            own = tl.maximum(tl.minimum(token, columns - 1), 0)
            bits = _bits(tl.load(of_raw + own, mask=there & (own < columns), other=0.0)) | (_LOW + 1)
            tl.store(at + start + some, tl.where(token >= 0, bits, 0), mask=there)


@jit(
    do_not_specialize=["batch", "ranks", "num_samples", "top", "given", "width", "unit"],
    do_not_specialize_on_alignment=[
        "theirs_ptr", "defined_ptr", "tops_ptr", "temperatures_ptr", "ids_ptr", "logprobs_ptr", "processed_ptr",
        "raw_ptr", "top_ids_ptr", "top_logprobs_ptr", "given_logprobs_ptr", "logsumexp_ptr",
    ],
)  # fmt: skip
def conclude_kernel(
    theirs_ptr,  # (ranks, B, width) int64: all ranks' words
    defined_ptr,  # (B,) int8
    tops_ptr,  # (B,) float32
    temperatures_ptr,  # (B,) float32
    ids_ptr,  # (B, num_samples) int64, out
    logprobs_ptr,  # (B, num_samples) float32, out; None: not asked for. So are the following
    processed_ptr,  # (B, num_samples) float32, out
    raw_ptr,  # (B, num_samples) float32, out: the winners' raw logits
    top_ids_ptr,  # (B, top) int64, out
    top_logprobs_ptr,  # (B, top) float32, out
    given_logprobs_ptr,  # (B, given) float32, out
    logsumexp_ptr,  # (B,) float32, out
    batch: tl.int32,
    ranks: tl.int32,
    num_samples: tl.int32,
    top: tl.int32,
    given: tl.int32,
    width: tl.int32,
    unit: tl.int64,
    LOGSUMEXP: tl.constexpr,  # the ranks say it
    RANKS: tl.constexpr,  # at least ``ranks``
    PLACES: tl.constexpr,  # at least ranks * top
    SOME: tl.constexpr,
):
    """``tensor_parallel.outputs.conclude``. Grid: (B,)."""
    row = tl.program_id(0).to(tl.int64)
    of_row, to_next = theirs_ptr + row * width, batch.to(tl.int64) * width
    defined = tl.load(defined_ptr + row) != 0
    some = tl.arange(0, SOME)
    rank = tl.arange(0, RANKS)
    of_rank = of_row + rank.to(tl.int64) * to_next
    at = num_samples
    if logprobs_ptr is not None:
        at = 2 * num_samples + 1
    lse = tl.full((), 0.0, tl.float64)
    if LOGSUMEXP:
        lse = tl.load(of_rank + at, mask=rank < ranks, other=0).to(tl.float64, bitcast=True)
        lse = _log_of_sum(tl.where(rank < ranks, lse, float("-inf")))
        at += 1
    if logsumexp_ptr is not None:
        tl.store(logsumexp_ptr + row, lse.to(tl.float32))
    for start in range(0, num_samples, SOME):
        draw = start + some
        there = draw < num_samples
        best = tl.zeros((SOME,), tl.int64)
        both = tl.zeros((SOME,), tl.int64)
        for other in range(ranks):
            of_other = of_row + other * to_next
            key = tl.load(of_other + draw, mask=there, other=0) & NAN_KEY
            if logprobs_ptr is not None:  # of equal ones the first rank's
                word = tl.load(of_other + num_samples + draw, mask=there, other=0)
                both = tl.where((key > best) | (other == 0), word, both)
            best = tl.maximum(best, key)
        token = tl.where(defined, (best & NO_TOKEN) ^ NO_TOKEN, -1)
        tl.store(ids_ptr + row * num_samples + draw, token, mask=there)
        if logprobs_ptr is not None:
            mass = tl.load(of_rank + 2 * num_samples, mask=rank < ranks, other=0)
            log_mass = tl.log(tl.sum(mass, axis=0).to(tl.float64) / unit.to(tl.float64))
            raw, x = _float32(both >> 32), _float32(both)
            top_logit, temperature = tl.load(tops_ptr + row), tl.load(temperatures_ptr + row)
            log_p = relative(x.to(tl.float64), top_logit.to(tl.float64), temperature) - log_mass
            log_p = tl.where(top_logit == float("inf"), 0.0, log_p)
            to = row * num_samples + draw
            none = float("nan")
            tl.store(
                logprobs_ptr + to, tl.where(token < 0, none, (raw.to(tl.float64) - lse).to(tl.float32)), mask=there
            )
            tl.store(processed_ptr + to, tl.where(token < 0, none, log_p.to(tl.float32)), mask=there)
            tl.store(raw_ptr + to, raw, mask=there)
    if top_ids_ptr is not None:
        index = tl.arange(0, PLACES)
        of_place = of_row + (index // top).to(tl.int64) * to_next + at + index % top
        places = tl.load(of_place, mask=index < ranks * top, other=LOWEST_PLACE)
        for nth in range(top):
            place = tl.max(places, axis=0)
            places = tl.where(places == place, LOWEST_PLACE, places)
            token = tl.where(lse != lse, -1, (place & NO_TOKEN) ^ NO_TOKEN)
            tl.store(top_ids_ptr + row * top + nth, token)
            logit = value_of((place >> 31).to(tl.int32)).to(tl.float64)
            tl.store(top_logprobs_ptr + row * top + nth, (logit - lse).to(tl.float32))
        at += top
    if given_logprobs_ptr is not None:
        for start in range(0, given, SOME):
            there = start + some < given
            word = tl.zeros((SOME,), tl.int64)
            for other in range(ranks):
                said = tl.load(of_row + other * to_next + at + start + some, mask=there, other=0)
                word = tl.maximum(word, said)
            logprob = (_float32(word).to(tl.float64) - lse).to(tl.float32)
            tl.store(
                given_logprobs_ptr + row * given + start + some, tl.where(word > 0, logprob, float("nan")), mask=there
            )


@jit(do_not_specialize=["columns", "num_samples", "blocks"], do_not_specialize_on_alignment=["winners_ptr", "out_ptr"])
def above_kernel(
    raw,  # (B, n) float32
    raw_stride,
    columns: tl.int32,
    winners_ptr,  # (B, num_samples) float32: the winners' raw logits
    out_ptr,  # (B, num_samples) int64, zeros; out
    num_samples: tl.int32,
    blocks: tl.int32,
    TILE: tl.constexpr,
):
    """``tensor_parallel.outputs.above``. Grid: (blocks * B,)."""
    row = (tl.program_id(0) // blocks).to(tl.int64)
    at = tl.program_id(0) % blocks * TILE + tl.arange(0, TILE)
    live = at < columns
    x = tl.load(raw + row * raw_stride + at, mask=live, other=float("-inf"))
    for draw in range(num_samples):
        logit = tl.load(winners_ptr + row * num_samples + draw)
        higher = tl.sum((live & (x > logit)).to(tl.int32), axis=0)
        tl.atomic_add(out_ptr + row * num_samples + draw, higher.to(tl.int64), mask=higher > 0, sem="relaxed")


@jit(do_not_specialize=["count", "ranks"], do_not_specialize_on_alignment=["theirs_ptr", "ids_ptr", "out_ptr"])
def ranks_kernel(
    theirs_ptr,  # (ranks, count) int64
    ids_ptr,  # (count,) int64
    out_ptr,  # (count,) int64, out
    count: tl.int64,
    ranks: tl.int32,
    BLOCK: tl.constexpr,
):
    """``tensor_parallel.outputs.put_ranks``. Grid: (ceil(count / BLOCK),)."""
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = index < count
    above = tl.zeros((BLOCK,), tl.int64)
    for rank in range(ranks):
        above += tl.load(theirs_ptr + count * rank + index, mask=live, other=0)
    token = tl.load(ids_ptr + index, mask=live, other=-1)
    tl.store(out_ptr + index, tl.where(token < 0, -1, 1 + above), mask=live)
