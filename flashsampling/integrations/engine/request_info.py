"""The needs of a request, and the reasons for which the engine draws its token."""

import dataclasses
from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...param_parsers import MAX_BIASED, MAX_TOP_LOGPROBS

BiasRow = tuple[NDArray[np.int32], NDArray[np.float32]]  # token ids and values


class Needs:
    """Bits for what a request needs besides a draw at a temperature. Plain integers: each operator of an IntFlag costs
    the host more than a microsecond."""

    FILTERS = 1  # top-k, top-p, min-p
    BIASES = 2  # logit_bias; stop tokens that the minimum length forbids
    MASK = 4  # allowed tokens, bad words, a grammar
    PENALTIES = 8
    LOGPROBS = 16
    MIN_TOKENS = 32  # besides BIASES
    JOINT = 64  # the mass of top-p is that of all tokens, not of the tokens that top-k keeps


class FallbackReason(IntEnum):
    """Why the engine draws a request's token; the value is an index of ``FALLBACK_REASONS``."""

    text: str

    def __new__(cls, text: str) -> "FallbackReason":
        """Numbers the members in their order."""
        member = int.__new__(cls, len(cls.__members__))
        member._value_, member.text = len(cls.__members__), text
        return member

    SERVED = "served"
    UNREADABLE = "parameters that cannot be read"  # those of another engine than is known
    MANY_LOGPROBS = f"logprobs of more than {MAX_TOP_LOGPROBS} tokens"
    MANY_BIASES = f"more than {MAX_BIASED} tokens with a bias"
    NOT_FINITE = "a bias that is not finite"
    # vLLM
    LOGPROBS_MODE = "a logprobs_mode other than raw_logprobs"
    LOGPROB_TOKEN_IDS = "logprob_token_ids"
    GRAMMAR_LOGPROBS = "logprobs with a grammar"
    LONG_BAD_WORDS = "bad words of several tokens"
    MIN_P_TOP_P = "min_p with top_p"
    THINKING = "thinking_token_budget"
    GRAMMAR_MIN_TOKENS = "min_tokens with a grammar"
    GRAMMAR_SHAPE = "a grammar of another shape"
    # SGLang
    PENALTIES = "penalties"
    PROCESSOR = "a custom logit processor"
    GIVEN_LOGPROBS = "logprobs of given tokens"
    LOGPROBS = "logprobs of a distribution that the step does not have"
    SAMPLES = "several samples with one seed"
    GRAMMAR = "a grammar without a bit mask"
    LOGITS = "hidden states to return, or logits that are there already"
    UNSEEN = "a batch that was made in another way"
    BEAMS = "beam search"
    SUPPORT = "the tokens that its filters leave to be returned"
    OBSERVER = "an observer of its logits"
    ALIGNED = "logprobs that are a prefill's to the bit"


FALLBACK_REASONS = tuple(reason.text for reason in FallbackReason)
_ALL = list(FallbackReason)
# reasons of requests, in the order of the log's line
VLLM_FALLBACKS = _ALL[FallbackReason.MANY_LOGPROBS : FallbackReason.GRAMMAR_SHAPE]
SGLANG_FALLBACKS = _ALL[FallbackReason.MANY_LOGPROBS : FallbackReason.LOGPROBS_MODE] + _ALL[FallbackReason.PENALTIES :]


@dataclasses.dataclass(frozen=True, eq=False)
class Biases:
    """Biases of one request's logits."""

    ids: NDArray[np.int32]  # (n,)
    values: NDArray[np.float32]  # (n,)
    stop_ids: NDArray[np.int32]  # (m,)
    min_length: int  # of the sequence before a stop token, prompt included: prompt_len + min_tokens

    def at(self, length: int) -> BiasRow:
        """Returns ids and values for a token that follows ``length`` tokens, the prompt's included."""
        if length >= self.min_length or not len(self.stop_ids):
            return self.ids, self.values
        minus_infinity = np.full(len(self.stop_ids), -np.inf, np.float32)
        return np.concatenate((self.ids, self.stop_ids)), np.concatenate((self.values, minus_infinity))

    def fallback_reason(self) -> FallbackReason:
        """Returns why the step cannot apply these biases, or SERVED."""
        if len(self.ids) + len(self.stop_ids) > MAX_BIASED:
            return FallbackReason.MANY_BIASES
        return FallbackReason.SERVED if np.isfinite(self.values).all() else FallbackReason.NOT_FINITE


NO_BIASES: BiasRow = np.empty(0, np.int32), np.empty(0, np.float32)


def parse_biases(bias: Mapping[int, float], stop_ids: Sequence[int], min_length: int) -> Biases | None:
    """Returns the biases of a request, or None without any."""
    if not bias and not stop_ids:
        return None
    ids, values = np.fromiter(bias.keys(), np.int32, len(bias)), np.fromiter(bias.values(), np.float32, len(bias))
    return Biases(ids, values, np.array(stop_ids, np.int32), min_length)


def stack_biases(rows: Sequence[BiasRow], count: int) -> BiasRow:
    """Returns ids (rows, ``count``), padded with -1, and values of the same shape."""
    ids = np.full((len(rows), count), -1, np.int32)
    values = np.zeros((len(rows), count), np.float32)
    for row, (row_ids, row_values) in enumerate(rows):
        ids[row, : len(row_ids)], values[row, : len(row_ids)] = row_ids, row_values
    return ids, values


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class RequestInfo:
    """A request as the fused step sees it. Compared by identity: one object per request."""

    reason: int  # FallbackReason
    needs: int = 0  # bits of ``Needs``
    biases: Biases | None = None
    batch_invariant: bool = False  # its tokens do not depend on batch mates: a seed, or the engine promises that
    mask: NDArray[np.int32] | None = None  # (ceil(V / 32),), bit t & 31 of word t >> 5
    has_grammar: bool = False
    row: Any = None  # sampling parameters, where the engine keeps none by slot


class RequestState:
    """The ``RequestInfo`` of the request in each slot, as columns."""

    def __init__(self, slots: int, rules: Any) -> None:
        self.rules = rules  # what all requests of a runner share
        self.reasons: NDArray[np.int8] = np.zeros(slots, np.int8)
        self.needs: NDArray[np.uint8] = np.zeros(slots, np.uint8)
        self.batch_invariant: NDArray[np.bool_] = np.zeros(slots, bool)
        self.biases: list[Biases | None] = [None] * slots
        self.min_lengths: NDArray[np.int32] = np.zeros(slots, np.int32)  # ``Biases.min_length``; 0 without biases

    def set(self, slot: int, info: RequestInfo) -> None:
        """Puts a request into a slot."""
        self.reasons[slot], self.needs[slot], self.biases[slot] = info.reason, info.needs, info.biases
        self.min_lengths[slot] = 0 if info.biases is None else info.biases.min_length
        self.batch_invariant[slot] = info.batch_invariant
