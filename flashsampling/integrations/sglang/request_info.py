"""SGLang's ``Req`` as a ``RequestInfo``, read on the host when it is first in a batch. That decides who draws.

SGLang's order is: frequency and presence penalties are added to the logits, the repetition penalty scales them, the
grammar masks them, ``logit_bias`` is added; then the temperature and the filters. Bias and mask commute. Penalties stay
SGLang's: when a step comes they are sums over the vocabulary, not the counts that ``sample`` reads.
"""

import math
import random
from typing import Any, NamedTuple

from ...param_parsers import MAX_TOP_LOGPROBS
from ..engine.request_info import Biases, FallbackReason, Needs, RequestInfo, parse_biases

DETERMINISTIC_SEED = 42  # SGLang's for a request without one, under --enable-deterministic-inference
_entropy = random.SystemRandom()


class SglangRules(NamedTuple):
    """Settings that all requests of a runner share."""

    vocab_size: int
    flashinfer: bool  # SGLang's sampling backend, else "pytorch"
    original_logprobs: bool  # SGLANG_RETURN_ORIGINAL_LOGPROB: before the temperature
    deterministic: bool  # --enable-deterministic-inference
    processors: bool  # --enable-custom-logit-processor
    forbids_ends: bool = False  # see ``settings.SglangRelease``
    aligns: bool = False  # likewise, and --enable-deterministic-inference


class Row(NamedTuple):
    """A request's parameters in a row of the step."""

    seed: int  # int64
    temperature: float  # 0: greedy
    top_k: int  # 0: off
    top_p: float
    min_p: float
    joint_top_p: int  # 1: top-p is of all tokens, whatever top-k keeps
    raw: float  # 1: the log-probabilities are the raw ones, 0: the processed ones
    divisor: float  # turns raw log-probabilities into those of the processed distribution, but for a constant


def read_request(request: Any, rules: SglangRules) -> RequestInfo:
    """Keeps on SGLang's ``Req`` what it needs, and returns that: a request without a seed keeps the seed that it
    gets."""
    try:
        info = parse_request(request, rules)
    except Exception:  # parameters of an unknown SGLang are SGLang's to read
        info = RequestInfo(FallbackReason.UNREADABLE)
    request.flashsampling = info
    return info


def parse_request(request: Any, rules: SglangRules) -> RequestInfo:
    """Returns what a request needs, and whether the fused step does exactly that."""
    params = request.sampling_params
    greedy = params.top_k <= 1
    top_k = params.top_k if 1 < params.top_k < rules.vocab_size else 0
    top_p, min_p = (1.0, 0.0) if greedy else (params.top_p, params.min_p)
    temperature = 1.0 if greedy else params.temperature
    # where SGLang leaves min-p to FlashInfer too, its top-p is of what top-k keeps
    joint = top_k > 0 and top_p < 1.0 and not (rules.flashinfer and min_p > 0.0)
    biases, has_grammar = _parse_biases(request, rules), request.grammar is not None
    needs = 0
    for holds, bit in (
        (top_k or top_p < 1.0 or min_p > 0.0, Needs.FILTERS),
        (joint, Needs.JOINT),
        (biases is not None, Needs.BIASES),
        (request.return_logprob, Needs.LOGPROBS),
    ):
        needs |= bit if holds else 0
    seed, has_seed = params.sampling_seed, params.sampling_seed is not None
    if seed is None:
        seed = DETERMINISTIC_SEED if rules.deterministic else _entropy.getrandbits(64)
    raw = _raw_logprobs(needs, has_grammar, temperature, rules)
    divisor = temperature if raw is False else 1.0
    seed, drawn_at = (int(seed) + 2**63) % 2**64 - 2**63, 0.0 if greedy else temperature
    row = Row(seed, drawn_at, top_k, top_p, min_p, int(joint), 0.0 if raw is False else 1.0, divisor)
    # a greedy request is not: SGLang's own logits may have another best token
    batch_invariant = rules.deterministic or (has_seed and not greedy)
    reason = _fallback_reason(request, needs, biases, row, raw, rules)
    return RequestInfo(reason, needs, biases, batch_invariant, has_grammar=has_grammar, row=row)


def _raw_logprobs(needs: int, has_grammar: bool, temperature: float, rules: SglangRules) -> bool | None:
    """Returns whether the log-probabilities that SGLang returns, of all tokens whatever the filters, are the raw ones;
    False: the processed ones, of what is drawn from; None: neither."""
    changed = bool(needs & Needs.BIASES) or has_grammar
    scaled = 1.0 if rules.original_logprobs else temperature  # SGLang has divided the logits by it
    if not changed and scaled == 1.0:
        return True
    return False if not needs & Needs.FILTERS and scaled == temperature else None


def _fallback_reason(
    request: Any, needs: int, biases: Biases | None, row: Row, raw: bool | None, rules: SglangRules
) -> FallbackReason:
    params, logprob = request.sampling_params, request.logprob
    if (params.frequency_penalty, params.presence_penalty, params.repetition_penalty) != (0.0, 0.0, 1.0):
        return FallbackReason.PENALTIES
    if rules.processors and request.custom_logit_processor:
        return FallbackReason.PROCESSOR
    if getattr(request, "beam_group", None) is not None:  # its leader's parameters do not have the width
        return FallbackReason.BEAMS
    if getattr(request, "return_sampling_mask", False):
        return FallbackReason.SUPPORT
    if biases is not None and biases.fallback_reason():
        return biases.fallback_reason()
    if row.temperature and not math.isfinite(row.temperature):
        return FallbackReason.NOT_FINITE
    if params.n > 1 and params.sampling_seed is not None and row.temperature:
        return FallbackReason.SAMPLES
    if request.return_logprob:
        if rules.aligns:
            return FallbackReason.ALIGNED
        if logprob.token_ids_logprob is not None:
            return FallbackReason.GIVEN_LOGPROBS
        if logprob.top_logprobs_num > min(MAX_TOP_LOGPROBS, rules.vocab_size):
            return FallbackReason.MANY_LOGPROBS
        changed = needs & Needs.BIASES or request.grammar is not None
        if raw is None or (logprob.top_logprobs_num and changed):  # the top tokens are those of the raw logits
            return FallbackReason.LOGPROBS
    return FallbackReason.SERVED


def _parse_biases(request: Any, rules: SglangRules) -> Biases | None:
    params, stops, tokenizer = request.sampling_params, set(), request.tokenizer
    if params.min_new_tokens > 0:
        stops = {*(params.stop_token_ids or ()), *(tokenizer.additional_stop_token_ids or ()), tokenizer.eos_token_id}
        if rules.forbids_ends:
            stops = (stops | set(request.eos_token_ids or ())) - {None}
    bias = {int(token): float(value) for token, value in (params.logit_bias or {}).items()}
    return parse_biases(bias, sorted(stops), len(request.origin_input_ids) + params.min_new_tokens)
