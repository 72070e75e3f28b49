"""What one of SGLang's requests asks for, noted on the host when it is first in a batch: that decides who does a step.

SGLang's order is: frequency and presence penalties are added to the logits, the repetition penalty scales them, the grammar
masks them, ``logit_bias`` is added; then the temperature and the filters. Bias and mask change nothing for each other.
Penalties stay SGLang's: when a step comes they are sums over the vocabulary, not the counts that ``sample`` reads.
"""

import math
import random
from enum import IntEnum, IntFlag
from typing import Any, NamedTuple

import numpy as np

from ...param_parsers import MAX_BIASED, MAX_TOP_LOGPROBS
from ..engine.common import Biases

DETERMINISTIC_SEED = 42  # what SGLang gives to a request without one, under --enable-deterministic-inference
_entropy = random.SystemRandom()


class Needs(IntFlag):
    """Beside a draw at a temperature."""

    FILTERS = 1  # top-k, top-p, min-p
    BIASES = 2  # logit_bias; min_new_tokens, until there are as many
    LOGPROBS = 4
    JOINT = 8  # a top-p that is of all tokens, whatever top-k kept


class FallbackReason(IntEnum):
    """Why SGLang draws a request's token: an index of ``FALLBACK_REASONS``."""

    SERVED = 0
    PENALTIES = 1
    PROCESSOR = 2
    MANY_LOGPROBS = 3
    GIVEN_LOGPROBS = 4
    LOGPROBS = 5
    MANY_BIASES = 6
    NOT_FINITE = 7
    SAMPLES = 8
    GRAMMAR = 9
    LOGITS = 10
    UNSEEN = 11
    BEAMS = 12
    SUPPORT = 13
    OBSERVER = 14
    ALIGNED = 15


FALLBACK_REASONS = (
    "served",
    "penalties",
    "a custom logit processor",
    f"logprobs of more than {MAX_TOP_LOGPROBS} tokens",
    "logprobs of given tokens",
    "logprobs of a distribution that the step does not have",
    f"more than {MAX_BIASED} tokens with a bias",
    "a bias that is not finite",
    "several samples with one seed",
    "a grammar without a bit mask",
    "hidden states to return, or logits that are there already",
    "a batch that was made in another way",
    "beam search",
    "the tokens that its filters leave to be returned",
    "an observer of its logits",
    "logprobs that are a prefill's to the bit",
)


class Rules(NamedTuple):
    """What all requests of a runner share."""

    vocab_size: int
    flashinfer: bool  # SGLang's sampling backend, else "pytorch"
    original_logprobs: bool  # SGLANG_RETURN_ORIGINAL_LOGPROB: before the temperature
    deterministic: bool  # --enable-deterministic-inference
    processors: bool  # --enable-custom-logit-processor
    forbids_ends: bool = False  # see ``settings.Release``
    aligns: bool = False  # likewise, and --enable-deterministic-inference


class Row(NamedTuple):
    """A request's parameters as a row of the step has them."""

    seed: int  # int64
    temperature: float  # 0: greedy
    top_k: int  # 0: off
    top_p: float
    min_p: float
    joint_top_p: int  # 1: top-p is of all tokens, whatever top-k kept
    raw: float  # 1: its log-probabilities are the raw ones, 0: the processed ones
    divisor: float  # of raw log-probabilities, that makes them those of the processed distribution but for a constant


class RequestInfo:
    """What a request means here. Compared by identity: one per request."""

    __slots__ = ("batch_invariant", "biases", "grammar", "reason", "row", "wants")

    def __init__(
        self,
        reason: FallbackReason,
        wants: Needs,
        batch_invariant: bool,
        grammar: bool,
        biases: Biases | None,
        row: Row,
    ) -> None:
        self.reason, self.wants = reason, wants
        self.batch_invariant = batch_invariant  # a seed was given: tokens must not depend on batch mates
        self.grammar = grammar
        self.biases, self.row = biases, row


def request_info_of(request: Any, rules: Rules) -> RequestInfo:
    """What SGLang's ``Req`` asks for, noted once: a request without a seed keeps the one that it is given."""
    noted = getattr(request, "flashsampling", None)
    if noted is None:
        noted = request.flashsampling = note(request, rules)
    return noted  # type: ignore[no-any-return]


def note(request: Any, rules: Rules) -> RequestInfo:
    """What it asks for, and whether the fused step does exactly that."""
    params = request.sampling_params
    greedy = params.top_k <= 1
    top_k = params.top_k if 1 < params.top_k < rules.vocab_size else 0
    top_p, min_p = (1.0, 0.0) if greedy else (params.top_p, params.min_p)
    wants = Needs(0)
    if top_k or top_p < 1.0 or min_p > 0.0:
        wants |= Needs.FILTERS
    # where SGLang asks FlashInfer for min-p too, its top-p is of what top-k kept
    joint = top_k > 0 and top_p < 1.0 and not (rules.flashinfer and min_p > 0.0)
    if joint:
        wants |= Needs.JOINT
    biases = _biases(request, rules)
    if biases is not None:
        wants |= Needs.BIASES
    if request.return_logprob:
        wants |= Needs.LOGPROBS
    seed = params.sampling_seed
    given = seed is not None
    if seed is None:
        seed = DETERMINISTIC_SEED if rules.deterministic else _entropy.getrandbits(64)
    temperature = 1.0 if greedy else params.temperature
    has_grammar = request.grammar is not None
    raw = _logprobs(wants, has_grammar, temperature, rules)
    row = Row(
        seed=(int(seed) + 2**63) % 2**64 - 2**63,
        temperature=0.0 if greedy else temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        joint_top_p=int(joint),
        raw=1.0 if raw or raw is None else 0.0,
        divisor=1.0 if raw or raw is None else temperature,
    )
    batch_invariant = rules.deterministic or (given and not greedy)  # of SGLang's own logits the best may be another
    return RequestInfo(
        _fallback_reason(request, wants, biases, row, raw, rules), wants, batch_invariant, has_grammar, biases, row
    )


def _logprobs(wants: Needs, has_grammar: bool, temperature: float, rules: Rules) -> bool | None:
    """Whether the log-probabilities that SGLang returns, of all tokens, filters or not, are the raw ones; False: the processed
    ones, of what is drawn from; None: neither."""
    changed = bool(wants & Needs.BIASES) or has_grammar
    scaled = 1.0 if rules.original_logprobs else temperature  # by what SGLang has divided the logits
    if not changed and scaled == 1.0:
        return True
    return False if not wants & Needs.FILTERS and scaled == temperature else None


def _fallback_reason(
    request: Any, wants: Needs, biases: Biases | None, row: Row, raw: bool | None, rules: Rules
) -> FallbackReason:
    params = request.sampling_params
    if (params.frequency_penalty, params.presence_penalty, params.repetition_penalty) != (0.0, 0.0, 1.0):
        return FallbackReason.PENALTIES
    if rules.processors and request.custom_logit_processor:
        return FallbackReason.PROCESSOR
    if (
        getattr(request, "beam_group", None) is not None
    ):  # which has the width: SGLang gives its leader other parameters
        return FallbackReason.BEAMS
    if getattr(request, "return_sampling_mask", False):
        return FallbackReason.SUPPORT
    if biases is not None:
        if len(biases.ids) + len(biases.stops) > MAX_BIASED:
            return FallbackReason.MANY_BIASES
        if not np.isfinite(biases.values).all():
            return FallbackReason.NOT_FINITE
    if row.temperature and not math.isfinite(row.temperature):
        return FallbackReason.NOT_FINITE
    if params.n > 1 and params.sampling_seed is not None and row.temperature:
        return FallbackReason.SAMPLES
    if request.return_logprob:
        if rules.aligns:
            return FallbackReason.ALIGNED
        if request.logprob.token_ids_logprob is not None:
            return FallbackReason.GIVEN_LOGPROBS
        if request.logprob.top_logprobs_num > min(MAX_TOP_LOGPROBS, rules.vocab_size):
            return FallbackReason.MANY_LOGPROBS
        changed = wants & Needs.BIASES or request.grammar is not None
        if raw is None or (request.logprob.top_logprobs_num and changed):  # the top tokens are those of the raw logits
            return FallbackReason.LOGPROBS
    return FallbackReason.SERVED


def _biases(request: Any, rules: Rules) -> Biases | None:
    params, stops = request.sampling_params, set()
    if params.min_new_tokens > 0:
        stops = set(params.stop_token_ids or ()) | set(request.tokenizer.additional_stop_token_ids or ())
        stops.add(request.tokenizer.eos_token_id)
        if rules.forbids_ends:
            stops = (stops | set(request.eos_token_ids or ())) - {None}
    bias = {int(token): float(value) for token, value in (params.logit_bias or {}).items()}
    if not bias and not stops:
        return None
    ids, values = np.fromiter(bias.keys(), np.int32, len(bias)), np.fromiter(bias.values(), np.float32, len(bias))
    least = len(request.origin_input_ids) + params.min_new_tokens
    return Biases(ids, values, np.array(sorted(stops), np.int32), least)
