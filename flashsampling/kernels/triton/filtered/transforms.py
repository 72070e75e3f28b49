"""Changes logits: the LM head's transform and what a request adds. Loads a row's parameters.

raw        logits after the head's bias, scale and soft cap
processed  raw logits after the request's biases, penalties and token mask: filters and draws are about these

Kernels take the structs below. Every field is an integer or a number at run time, an address 0 says that a parameter is
absent: one compiled kernel serves all requests.
"""

from typing import NamedTuple

import triton.language as tl

from ....sampling_params import HEAD_NUMBERS
from ..jit import jit
from .order import LOG2E, exp2


class Rows(NamedTuple):
    """Temperature, seed and offset: an address of (B,) values, or 0 and the number for all rows."""

    temperature_at: int  # float32
    temperature: float
    seed_at: int  # int64
    seed: int
    offset_at: int  # int64
    offset: int


class Filters(NamedTuple):
    """The filters, likewise: ``SamplingParams.filter_values``, and the width of the first."""

    top_k_wide: int
    top_k_at: int  # int64, or int32 where not ``top_k_wide``
    top_k: int
    top_p_at: int  # float32
    top_p: float
    min_p_at: int  # float32
    min_p: float
    joint_at: int  # int32; not 0: top-p takes its share of all tokens, not of those that top-k keeps
    joint: int
    epsilon_at: int  # float32
    epsilon: float
    sigmas_at: int  # float32
    sigmas: float


# The LM head's transform of a logit: the address of its bias (V,) float32, or 0; numbers
HeadTransform = NamedTuple(  # type: ignore[misc]
    "HeadTransform", [("bias_at", int), *((name, float) for name in HEAD_NUMBERS)]
)


class RequestTransforms(NamedTuple):
    """The changes that requests ask of logits: biases, penalties, token masks; addresses, or 0."""

    dense_bias_at: int  # (V,) float32
    bias_ids_at: int  # (B, n) int32
    bias_values_at: int  # (B, n) float32
    bias_count: int  # n
    ids_stride: int
    values_stride: int
    counts_at: int  # (B, V) int32
    counts_stride: int
    token_mask_at: int  # (B, ceil(V / 32)) int32
    mask_stride: int
    repetition_at: int  # (B,) float32, or 0 and a number; so are the following
    repetition: float
    frequency_at: int
    frequency: float
    presence_at: int
    presence: float
    counts_rows_at: int  # (B,) int64: each row's row of counts, or 0


class RowFilters(NamedTuple):
    """The filters of one row."""

    top_k: object  # int64
    top_p: object
    min_p: object
    epsilon: object
    sigmas: object  # standard deviations
    by_top_k: object  # whether it has a top-k
    by_top_p: object
    by_min_p: object  # or an epsilon cutoff that serves as one
    by_epsilon: object
    by_sigma: object
    of_top_k: object  # whether top-p takes its share of what top-k keeps
    of_all: object  # whether the epsilon cutoff is a share of all tokens: there is no other filter
    is_rare: object  # whether masses of what other filters keep come before the draw
    filtered: object  # whether it has any
    undefined: object  # whether one is NaN


@jit
def pointer_to(address, TYPE: tl.constexpr):
    """Returns a pointer to elements of a type at an address."""
    return address.to(tl.int64).to(tl.pointer_type(TYPE))


@jit
def aligned_pointer_to(address, TYPE: tl.constexpr):
    """Returns a pointer to elements of a type at an address that is a multiple of 16."""
    return tl.multiple_of(pointer_to(address, TYPE), 16)


@jit
def load_f32(address, number, row):
    """Loads a row's float32 parameter; returns the number where the address is 0."""
    pointer = pointer_to(address, tl.float32) + row
    return tl.load(pointer, mask=address != 0, other=number)


@jit
def load_i64(address, number, row):
    """Loads a row's int64 parameter; returns the number where the address is 0."""
    pointer = pointer_to(address, tl.int64) + row
    return tl.load(pointer, mask=address != 0, other=number)


@jit
def _load_i32(address, number, row):
    pointer = pointer_to(address, tl.int32) + row
    return tl.load(pointer, mask=address != 0, other=number.to(tl.int32))


@jit
def load_filters(filters, row, vocab_size):
    """Loads a row's ``RowFilters``."""
    wide = filters.top_k_wide != 0
    narrow = _load_i32(tl.where(wide, 0, filters.top_k_at), filters.top_k, row).to(tl.int64)
    top_k = tl.where(wide, load_i64(tl.where(wide, filters.top_k_at, 0), filters.top_k, row), narrow)
    top_p = load_f32(filters.top_p_at, filters.top_p, row)
    min_p = load_f32(filters.min_p_at, filters.min_p, row)
    joint = _load_i32(filters.joint_at, filters.joint, row) != 0
    by_top_k = (top_k > 0) & (top_k < vocab_size)
    by_top_p = (top_p >= 1.0) == 0  # also if NaN
    by_min_p = (min_p <= 0.0) == 0
    epsilon = load_f32(filters.epsilon_at, filters.epsilon, row)
    sigmas = load_f32(filters.sigmas_at, filters.sigmas, row)
    by_epsilon, by_sigma = (epsilon <= 0.0) == 0, (sigmas <= 0.0) == 0
    others = by_top_k | by_top_p | by_min_p | by_sigma
    of_all = by_epsilon & (others == 0)
    undefined = (top_p != top_p) | (min_p != min_p) | (epsilon != epsilon) | (sigmas != sigmas)
    return RowFilters(
        top_k, top_p, min_p, epsilon, sigmas, by_top_k, by_top_p, by_min_p | of_all, by_epsilon, by_sigma,
        by_top_k & (joint == 0), of_all, by_sigma | (by_epsilon & others), others | by_epsilon, undefined,
    )  # fmt: skip


@jit
def _vector(address, row, stride):
    """Returns a pointer to a row of a matrix of 32-bit elements, int32."""
    return pointer_to(address, tl.int32) + row.to(tl.int64) * stride.to(tl.int64)


@jit
def _load_numbers(pointer, tokens, live):
    """Loads float32 numbers behind an int32 pointer; 0 where not live."""
    return tl.load(pointer.to(tl.pointer_type(tl.float32)) + tokens, mask=live, other=0.0)


@jit
def _tanh(x):
    """Computes tanh within 3e-7 relatively: a continued fraction near 0, exponentials elsewhere. Triton has no tanh of
    its own."""
    x2 = x * x
    e = exp2(tl.abs(x) * (-2.0 * LOG2E))
    is_near = tl.abs(x) < 0.6  # one division, of what is chosen
    above = tl.where(is_near, x * (945.0 + x2 * (105.0 + x2)), tl.where(x < 0.0, e - 1.0, 1.0 - e))
    below = tl.where(is_near, 945.0 + x2 * (420.0 + x2 * 15.0), 1.0 + e)
    return above / below


@jit
def raw_logits(head, logits, tokens, live):
    """Returns raw logits of a tuple of float32 logits; -inf where not live, as they are."""
    if head.bias_at != 0:
        biased = ()
        for i in tl.static_range(len(logits)):
            biased = biased + (
                logits[i] + tl.load(pointer_to(head.bias_at, tl.float32) + tokens[i], mask=live[i], other=0.0),
            )
        logits = biased
    if head.logit_scale != 1.0:
        scaled = ()
        for i in tl.static_range(len(logits)):
            scaled = scaled + (tl.where(live[i], logits[i] * head.logit_scale, float("-inf")),)
        logits = scaled
    if head.soft_cap > 0.0:
        capped = ()
        for i in tl.static_range(len(logits)):
            x = _tanh(logits[i] / head.soft_cap) * head.soft_cap
            capped = capped + (tl.where(live[i], x, float("-inf")),)
        logits = capped
    return logits


@jit
def is_allowed(transforms, row, tokens, live):
    """Returns which of the live tokens the token mask allows; all without a mask."""
    if transforms.token_mask_at != 0:
        words = _vector(transforms.token_mask_at, row, transforms.mask_stride)
        word = tl.load(words + (tokens >> 5), mask=live, other=0)
        live = live & (((word >> (tokens & 31)) & 1) != 0)
    return live


@jit
def _biased(transforms, row, logits, tokens, first, last, AT_ONCE: tl.constexpr):
    """Adds the sparse bias of the tokens [first, last) to a tuple of logits, in the order of its entries."""
    ids = _vector(transforms.bias_ids_at, row, transforms.ids_stride)
    values = _vector(transforms.bias_values_at, row, transforms.values_stride)
    for start in range(0, transforms.bias_count, AT_ONCE):
        index = start + tl.arange(0, AT_ONCE)
        id = tl.load(ids + index, mask=index < transforms.bias_count, other=-1)
        pending = (id >= first) & (id < last)
        for _ in range(tl.sum(pending.to(tl.int32), axis=0)):
            entry = tl.min(tl.where(pending, index, 0x7FFFFFFF), axis=0)
            pending = pending & (index != entry)
            token = tl.load(ids + entry)
            value = _load_numbers(values, entry, True)
            biased = ()
            for i in tl.static_range(len(logits)):
                biased = biased + (tl.where(tokens[i] == token, logits[i] + value, logits[i]),)
            logits = biased
    return logits


@jit
def processed_logits(transforms, row, raw, tokens, live, first, last):
    """Returns processed logits of a tuple of raw logits whose tokens lie in [first, last)."""
    logits = raw
    if transforms.dense_bias_at != 0:
        biased = ()
        for i in tl.static_range(len(raw)):
            bias = pointer_to(transforms.dense_bias_at, tl.float32)
            biased = biased + (logits[i] + tl.load(bias + tokens[i], mask=live[i], other=0.0),)
        logits = biased
    if transforms.bias_ids_at != 0:
        logits = _biased(transforms, row, logits, tokens, first, last, 32)
    if transforms.counts_at != 0:
        repetition = load_f32(transforms.repetition_at, transforms.repetition, row)
        frequency = load_f32(transforms.frequency_at, transforms.frequency, row)
        presence = load_f32(transforms.presence_at, transforms.presence, row)
        counts_row = load_i64(transforms.counts_rows_at, row, row)
        pointer = _vector(transforms.counts_at, counts_row, transforms.counts_stride)
        penalized = ()
        for i in tl.static_range(len(raw)):
            x = logits[i]
            counts = tl.load(pointer + tokens[i], mask=live[i], other=0)
            x = tl.where(counts != 0, tl.where(x > 0.0, x / repetition, x * repetition), x)
            times = (counts & 0x7FFFFFFF).to(tl.float32)
            penalized = penalized + (tl.where(times > 0.0, x - frequency * times - presence, x),)
        logits = penalized
    if transforms.token_mask_at != 0:
        masked = ()
        for i in tl.static_range(len(raw)):
            masked = masked + (tl.where(is_allowed(transforms, row, tokens[i], live[i]), logits[i], float("-inf")),)
        logits = masked
    return logits
