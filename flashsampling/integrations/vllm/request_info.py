"""vLLM's ``SamplingParams`` as a ``RequestInfo``, read on the host when a request is added. That decides who draws."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...param_parsers import MAX_TOP_LOGPROBS
from ..engine.request_info import Biases, FallbackReason, Needs, RequestInfo, parse_biases

_GREEDY_BELOW = 1e-5  # vLLM takes a lower temperature for 0


class VllmRules(NamedTuple):
    """Settings that all requests of a runner share."""

    vocab_size: int
    raw_logprobs: bool  # vLLM's logprobs_mode is the one that the step has
    min_tokens_respects_grammar: bool = False  # see ``settings.VllmRelease``
    invariant: bool = False  # VLLM_BATCH_INVARIANT: a greedy request's tokens do not depend on batch mates either


def parse_request(params: Any, prompt_len: int, rules: VllmRules) -> RequestInfo:
    """Returns what vLLM's ``SamplingParams`` need, and whether the fused step does exactly that."""
    try:
        return _parse(params, prompt_len, rules)
    except Exception:  # parameters of an unknown vLLM are vLLM's to read
        return RequestInfo(FallbackReason.UNREADABLE)


def _parse(params: Any, prompt_len: int, rules: VllmRules) -> RequestInfo:
    needs = 0
    greedy = params.temperature < _GREEDY_BELOW
    if not greedy and (0 < params.top_k < rules.vocab_size or params.top_p < 1.0 or params.min_p > 0.0):
        needs |= Needs.FILTERS
    if params.repetition_penalty != 1.0 or params.frequency_penalty != 0.0 or params.presence_penalty != 0.0:
        needs |= Needs.PENALTIES
    if params.logprobs is not None:
        needs |= Needs.LOGPROBS
    stop_ids = sorted(params.all_stop_token_ids) if params.min_tokens > 0 else []
    biases = parse_biases(params.logit_bias or {}, stop_ids, prompt_len + params.min_tokens)
    if biases is not None:
        needs |= Needs.BIASES | (Needs.MIN_TOKENS if stop_ids else 0)
    bad_words = params.bad_words_token_ids or []
    mask = None
    if params.allowed_token_ids or bad_words:
        needs |= Needs.MASK
        mask = pack_mask(rules.vocab_size, params.allowed_token_ids, [word[-1] for word in bad_words if word])
    batch_invariant = rules.invariant if greedy else params.seed is not None
    return RequestInfo(_fallback_reason(params, biases, greedy, rules), needs, biases, batch_invariant, mask)


def _fallback_reason(params: Any, biases: Biases | None, greedy: bool, rules: VllmRules) -> FallbackReason:
    if params.thinking_token_budget is not None:
        return FallbackReason.THINKING
    if params.logprob_token_ids:
        return FallbackReason.LOGPROB_TOKEN_IDS
    if params.logprobs is not None:
        if not rules.raw_logprobs:
            return FallbackReason.LOGPROBS_MODE
        if not 0 <= params.logprobs <= min(MAX_TOP_LOGPROBS, rules.vocab_size):
            return FallbackReason.MANY_LOGPROBS
    if any(len(word) != 1 for word in params.bad_words_token_ids or []):
        return FallbackReason.LONG_BAD_WORDS
    # vLLM's top-p is of what min-p keeps, the step's of what top-k keeps
    if not greedy and params.min_p > 0.0 and params.top_p < 1.0:
        return FallbackReason.MIN_P_TOP_P
    if biases is not None and biases.fallback_reason():
        return biases.fallback_reason()
    penalties = params.repetition_penalty, params.frequency_penalty, params.presence_penalty
    return FallbackReason.SERVED if all(map(math.isfinite, penalties)) else FallbackReason.NOT_FINITE


def pack_mask(vocab_size: int, allowed: Sequence[int] | None, banned: Sequence[int]) -> NDArray[np.int32]:
    """Returns bits of the tokens that may be drawn. ``allowed``: None or empty allows all tokens but the banned
    ones."""
    bits = np.full(-(-vocab_size // 32) * 32, not allowed)
    for ids, value in ((allowed or (), True), (banned, False)):
        index = np.asarray(ids, np.int64)
        bits[index[(index >= 0) & (index < vocab_size)]] = value
    return np.packbits(bits, bitorder="little").view(np.int32)
