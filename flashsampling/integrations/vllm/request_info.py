"""What the request in each of vLLM's slots asks for, noted on the host when it is added: that decides who does a step."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...param_parsers import MAX_BIASED, MAX_TOP_LOGPROBS
from ..engine.common import Biases

_GREEDY_BELOW = 1e-5  # where vLLM takes a temperature for 0


class Needs:
    """Bits of what is wanted beside a draw at a temperature. Plain integers: each operator of an IntFlag would cost a step more
    than a microsecond of the host."""

    FILTERS = 1  # top-k, top-p, min-p
    BIASES = 2  # logit_bias; min_tokens, until there are as many
    MASK = 4  # allowed_token_ids, bad words
    PENALTIES = 8
    LOGPROBS = 16
    MIN_TOKENS = 32  # beside BIASES


SERVED = 0
MANY_LOGPROBS, LOGPROBS_MODE, GIVEN_LOGPROBS, GRAMMAR_LOGPROBS, LONG_BAD_WORDS, MIN_P_TOP_P, MANY_BIASES = range(1, 8)
NOT_FINITE, THINKING, GRAMMAR_MIN_TOKENS, DRAFTS, GRAMMAR, UNREAD = range(8, 14)
FALLBACK_REASONS = (
    "served",
    f"logprobs of more than {MAX_TOP_LOGPROBS} tokens",
    "a logprobs_mode other than raw_logprobs",
    "logprob_token_ids",
    "logprobs with a grammar",
    "bad words of several tokens",
    "min_p with top_p",
    f"more than {MAX_BIASED} tokens with a bias",
    "a bias that is not finite",
    "thinking_token_budget",
    "min_tokens with a grammar",
    "drafts",
    "a grammar of another shape",
    "parameters that cannot be read",
)


class Rules(NamedTuple):
    """What all requests of a runner share."""

    vocab_size: int
    raw_logprobs: bool  # vLLM's logprobs_mode is the one that ours are
    min_tokens_respects_grammar: bool = False  # see ``settings.Release``
    invariant: bool = False  # VLLM_BATCH_INVARIANT: a greedy request's tokens must not depend on batch mates either


class RequestInfo(NamedTuple):
    """What a request's ``SamplingParams`` mean here."""

    reason: int  # an index of ``FALLBACK_REASONS``
    wants: int  # bits of ``Needs``
    biases: Biases | None
    mask: NDArray[np.int32] | None  # (ceil(V / 32),), bit t & 31 of word t >> 5


def note(params: Any, prompt_len: int, rules: Rules) -> RequestInfo:
    """What vLLM's ``SamplingParams`` ask for, and whether the fused step does exactly that."""
    wants = 0
    greedy = params.temperature < _GREEDY_BELOW
    if not greedy and (0 < params.top_k < rules.vocab_size or params.top_p < 1.0 or params.min_p > 0.0):
        wants |= Needs.FILTERS
    if params.repetition_penalty != 1.0 or params.frequency_penalty != 0.0 or params.presence_penalty != 0.0:
        wants |= Needs.PENALTIES
    if params.logprobs is not None:
        wants |= Needs.LOGPROBS
    biases = _biases(params, prompt_len)
    if biases is not None:
        wants |= Needs.BIASES
        if len(biases.stops):
            wants |= Needs.MIN_TOKENS
    bad_words = params.bad_words_token_ids or []
    mask = None
    if params.allowed_token_ids or bad_words:
        wants |= Needs.MASK
        mask = mask_of(rules.vocab_size, params.allowed_token_ids, [word[-1] for word in bad_words if word])
    return RequestInfo(_fallback_reason(params, biases, greedy, rules), wants, biases, mask)


def _fallback_reason(params: Any, biases: Biases | None, greedy: bool, rules: Rules) -> int:
    if params.thinking_token_budget is not None:
        return THINKING
    if params.logprob_token_ids:
        return GIVEN_LOGPROBS
    if params.logprobs is not None:
        if not rules.raw_logprobs:
            return LOGPROBS_MODE
        if not 0 <= params.logprobs <= min(MAX_TOP_LOGPROBS, rules.vocab_size):
            return MANY_LOGPROBS
    if any(len(word) != 1 for word in params.bad_words_token_ids or []):
        return LONG_BAD_WORDS
    if (
        not greedy and params.min_p > 0.0 and params.top_p < 1.0
    ):  # vLLM's top-p is of what min-p kept, ours of what top-k kept
        return MIN_P_TOP_P
    if biases is not None:
        if len(biases.ids) + len(biases.stops) > MAX_BIASED:
            return MANY_BIASES
        if not np.isfinite(biases.values).all():
            return NOT_FINITE
    penalties = params.repetition_penalty, params.frequency_penalty, params.presence_penalty
    if not all(map(math.isfinite, penalties)):
        return NOT_FINITE
    return SERVED


def _biases(params: Any, prompt_len: int) -> Biases | None:
    bias = params.logit_bias or {}
    stops = sorted(params.all_stop_token_ids) if params.min_tokens > 0 else []
    if not bias and not stops:
        return None
    ids, values = np.fromiter(bias.keys(), np.int32, len(bias)), np.fromiter(bias.values(), np.float32, len(bias))
    return Biases(ids, values, np.array(stops, np.int32), prompt_len + params.min_tokens)


def mask_of(vocab_size: int, allowed: Sequence[int] | None, banned: Sequence[int]) -> NDArray[np.int32]:
    """Bits of the tokens that may be drawn; None: all of them but what is banned."""
    bits = np.full(-(-vocab_size // 32) * 32, not allowed)
    for ids, value in ((allowed or (), True), (banned, False)):
        index = np.asarray(ids, np.int64)
        bits[index[(index >= 0) & (index < vocab_size)]] = value
    return np.packbits(bits, bitorder="little").view(np.int32)


class Slots:
    """What is noted of every slot."""

    def __init__(self, count: int, rules: Rules) -> None:
        self.rules = rules
        self.reasons: NDArray[np.int8] = np.zeros(count, np.int8)
        self.wants: NDArray[np.uint8] = np.zeros(count, np.uint8)
        self.batch_invariant: NDArray[np.bool_] = np.zeros(
            count, bool
        )  # by a seed, or vLLM: tokens must not depend on batch mates
        self.biases: list[Biases | None] = [None] * count
        self.least: NDArray[np.int32] = np.zeros(count, np.int32)  # tokens before which stop tokens may not be drawn

    def add(self, slot: int, params: Any, prompt_len: int) -> RequestInfo:
        """A request takes a slot."""
        try:
            noted, greedy = note(params, prompt_len, self.rules), params.temperature < _GREEDY_BELOW
            batch_invariant = self.rules.invariant if greedy else params.seed is not None
        except Exception:  # parameters of another vLLM than is known: they are vLLM's to read
            noted, batch_invariant = RequestInfo(UNREAD, 0, None, None), False
        self.reasons[slot], self.wants[slot], self.biases[slot] = noted.reason, noted.wants, noted.biases
        self.least[slot] = 0 if noted.biases is None else noted.biases.least
        self.batch_invariant[slot] = batch_invariant
        return noted
