"""Maps logits processors of transformers to sampling parameters, or raises an error that names them.

transformers applies a list of processors to the logits of every step. ``sample`` has one order: bias, repetition
penalty, mask, temperature, top-k, top-p, min-p, epsilon cutoff. ``read_processors`` accepts a list if both orders have
the same result for every logit (``_NOT_AFTER``). ``processor_params`` makes the arguments of each step.

    bias           must come before a penalty or temperature, which would change it
    mask           is -inf, which no bias, penalty or temperature changes; filters before it would keep other tokens
    temperature    keeps order and sign, so it commutes with a penalty, a mask and top-k, but not with top-p and min-p
    top-k, min-p   commute: both keep the tokens above a line, and the first token's probability does not change
    top-p          depends on the mass that earlier filters leave, but not on later filters; an epsilon cutoff likewise

Instances are read, not configurations, because transformers computes with their attributes. They are the same for all
rows and depend only on the sequence's length, apart from biases after a prefix (words of several tokens) and repeated
n-grams, which ``processor_params`` looks up on the device.
"""

import math
from collections.abc import Callable
from functools import partial
from numbers import Integral, Real
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.generation import logits_process as processors_of


class TokenRule(NamedTuple):
    """Bans tokens, or forces one, while a sequence has from ``first`` up to ``last`` tokens."""

    ids: tuple[int, ...]
    first: int = 0
    last: float = math.inf
    forced: bool = False


class ProcessorParams:
    """The parameters of a list of processors, for all sequences and lengths."""

    def __init__(self) -> None:
        self.temperature, self.top_k, self.top_p, self.min_p, self.repetition_penalty = 1.0, 0, 1.0, 0.0, 1.0
        self.epsilon_cutoff = 0.0
        self.left_out: int | Tensor = 0  # first positions that the penalty ignores, for all rows or (B,)
        # token ids and a value, which is added to the last id if the sequence ends with the other ids
        self.biases: list[tuple[tuple[int, ...], float]] = []
        self.rules: list[TokenRule] = []  # in order: later rules win
        self.ngrams: list[int] = []  # sizes of n-grams that must not repeat
        # argument, ids that the head must have for it, and the length of a sequence from which it has no effect
        self.required: list[tuple[str, tuple[int, ...], float]] = []


class UnsupportedProcessorError(ValueError):
    """The reason why a processor is not supported; ``read_processors`` puts it into its error."""


# -- the attributes of each class, checked: users may have changed them

_SMALLEST, _MAX_FLOAT32 = math.ulp(0.0), torch.finfo(torch.float32).max
_RANGES: dict[str, tuple[Any, float, float]] = {
    "temperature": (Real, _SMALLEST, math.inf),
    "top_k": (Integral, 1, math.inf),
    "top_p": (Real, 0, 1),
    "min_p": (Real, 0, 1),
    "epsilon": (Real, _SMALLEST, math.nextafter(1.0, 0.0)),
    "penalty": (Real, _SMALLEST, _MAX_FLOAT32),
    "prompt_ignore_length": (Integral, 0, math.inf),
    "ngram_size": (Integral, 1, math.inf),
    "min_length": (Integral, 0, math.inf),
    "prompt_length_to_skip": (Integral, 0, math.inf),
    "min_new_tokens": (Integral, 0, math.inf),
    "begin_index": (Integral, 0, math.inf),
    "max_length": (Integral, 0, math.inf),
}


def read_number(processor: Any, name: str) -> Any:
    """Returns a processor's attribute. Raises ValueError unless it is a number in transformers' range."""
    kind, least, most = _RANGES[name]
    value = getattr(processor, name, None)
    if not isinstance(value, kind) or not least <= value <= most:  # NaN too
        ends = "above 0" if least == _SMALLEST else f"{least} or more"
        ends += "" if most == math.inf else f", up to {most:g}"
        wanted = "an integer" if kind is Integral else "a number"
        raise ValueError(f"{type(processor).__name__}: {name} must be {wanted}, {ends}, got {value!r}")
    return int(value) if kind is Integral else float(value)


def read_ids(processor: Any, name: str, ids: Any) -> tuple[int, ...]:
    """Returns token ids as a tuple, perhaps empty. Raises ValueError for anything but integers."""
    if isinstance(ids, Tensor):
        ids = ids.reshape(-1).tolist()  # an empty list is a float tensor
    if not isinstance(ids, (list, tuple)) or not all(isinstance(token, Integral) for token in ids):
        raise ValueError(f"{type(processor).__name__}: {name} must hold token ids, which are integers, got {ids!r}")
    return tuple(map(int, ids))


# -- one function per class: reads a processor into the parameters


def _temperature(params: ProcessorParams, processor: Any) -> None:
    params.temperature *= read_number(processor, "temperature")


def _top_k(params: ProcessorParams, processor: Any) -> None:
    _require_plain_filter(processor)
    # 2**31 - 1: more tokens than any model has
    params.top_k = min(params.top_k or 2**31 - 1, read_number(processor, "top_k"))


def _top_p(params: ProcessorParams, processor: Any) -> None:
    _require_plain_filter(processor)
    params.top_p = read_number(processor, "top_p")


def _min_p(params: ProcessorParams, processor: Any) -> None:
    _require_plain_filter(processor)
    params.min_p = max(params.min_p, read_number(processor, "min_p"))


def _epsilon(params: ProcessorParams, processor: Any) -> None:
    _require_plain_filter(processor)
    params.epsilon_cutoff = read_number(processor, "epsilon")


def _require_plain_filter(processor: Any) -> None:
    filter_value = getattr(processor, "filter_value", None)
    if filter_value != -math.inf:
        raise UnsupportedProcessorError(f"filter_value={filter_value} does not remove a token")
    if getattr(processor, "min_tokens_to_keep", 1) != 1:  # older releases include it in top_k
        raise UnsupportedProcessorError(f"min_tokens_to_keep={processor.min_tokens_to_keep}")


def _penalty(params: ProcessorParams, processor: Any) -> None:
    params.repetition_penalty = read_number(processor, "penalty")
    left_out = getattr(processor, "prompt_ignore_length", None)
    if isinstance(left_out, Tensor) and left_out.ndim == 1 and not left_out.is_complex():  # one per row
        params.left_out = left_out
    else:
        params.left_out = 0 if left_out is None else read_number(processor, "prompt_ignore_length")


def _biases(params: ProcessorParams, processor: Any, argument: str) -> None:
    """Reads biases, or banned words, which are biases of -inf."""
    biases = getattr(processor, "sequence_bias", None)  # both classes hold a dictionary
    if not isinstance(biases, dict):
        raise ValueError(f"{type(processor).__name__}: sequence_bias must be a dictionary, got {biases!r}")
    for given, value in biases.items():
        ids = read_ids(processor, argument, given)
        if not isinstance(value, Real):
            raise ValueError(f"{type(processor).__name__}: {argument} must have numbers as biases, got {value!r}")
        value = float(value)
        if not value <= _MAX_FLOAT32:
            raise UnsupportedProcessorError(f"a bias must be below infinity, got {value}")
        if not ids:  # a tokenizer's result for "": transformers ignores it (5.17 fails)
            continue
        params.required.append((argument, ids, math.inf))
        if value == -math.inf and len(ids) == 1:
            params.rules.append(TokenRule(ids))
        else:
            params.biases.append((ids, value))


def _ngrams(params: ProcessorParams, processor: Any) -> None:
    params.ngrams.append(read_number(processor, "ngram_size"))


def _min_length(params: ProcessorParams, processor: Any) -> None:
    ids = read_ids(processor, "eos_token_id", getattr(processor, "eos_token_id", None))
    params.rules.append(TokenRule(ids, last=read_number(processor, "min_length")))


def _min_new_tokens(params: ProcessorParams, processor: Any) -> None:
    last = read_number(processor, "prompt_length_to_skip") + read_number(processor, "min_new_tokens")
    ids = read_ids(processor, "eos_token_id", getattr(processor, "eos_token_id", None))
    params.rules.append(TokenRule(ids, last=last))


def _suppressed(params: ProcessorParams, processor: Any) -> None:
    params.rules.append(TokenRule(read_ids(processor, "suppress_tokens", getattr(processor, "suppress_tokens", None))))


def _suppressed_at_begin(params: ProcessorParams, processor: Any) -> None:
    begin = read_number(processor, "begin_index")
    ids = read_ids(processor, "begin_suppress_tokens", getattr(processor, "begin_suppress_tokens", None))
    params.rules.append(TokenRule(ids, begin, begin + 1))


def _forced_bos(params: ProcessorParams, processor: Any) -> None:
    ids = read_ids(processor, "forced_bos_token_id", (getattr(processor, "bos_token_id", None),))
    _force(params, "forced_bos_token_id", ids, 1)


def _forced_eos(params: ProcessorParams, processor: Any) -> None:
    ids = read_ids(processor, "forced_eos_token_id", getattr(processor, "eos_token_id", None))
    _force(params, "forced_eos_token_id", ids, read_number(processor, "max_length") - 1)


def _force(params: ProcessorParams, argument: str, ids: tuple[int, ...], length: int) -> None:
    if not ids:
        raise ValueError(f"{argument} must be a token id, got none")
    if len(ids) > 1:
        raise UnsupportedProcessorError(
            f"one of the tokens {list(ids)} would be drawn as often as another, whatever their logits"
        )
    params.required.append((argument, ids, length + 1))
    params.rules.append(TokenRule(ids, length, length + 1, forced=True))


class _ProcessorKind(NamedTuple):
    stage: str
    read: Callable[[ProcessorParams, Any], None]


_KINDS = {
    processors_of.SequenceBiasLogitsProcessor: _ProcessorKind("bias", partial(_biases, argument="sequence_bias")),
    processors_of.RepetitionPenaltyLogitsProcessor: _ProcessorKind("penalty", _penalty),
    processors_of.NoBadWordsLogitsProcessor: _ProcessorKind("words", partial(_biases, argument="bad_words_ids")),
    processors_of.NoRepeatNGramLogitsProcessor: _ProcessorKind("words", _ngrams),
    processors_of.MinLengthLogitsProcessor: _ProcessorKind("mask", _min_length),
    processors_of.MinNewTokensLengthLogitsProcessor: _ProcessorKind("mask", _min_new_tokens),
    processors_of.SuppressTokensLogitsProcessor: _ProcessorKind("mask", _suppressed),
    processors_of.SuppressTokensAtBeginLogitsProcessor: _ProcessorKind("mask", _suppressed_at_begin),
    processors_of.ForcedBOSTokenLogitsProcessor: _ProcessorKind("forced", _forced_bos),
    processors_of.ForcedEOSTokenLogitsProcessor: _ProcessorKind("forced", _forced_eos),
    processors_of.TemperatureLogitsWarper: _ProcessorKind("temperature", _temperature),
    processors_of.TopKLogitsWarper: _ProcessorKind("top_k", _top_k),
    processors_of.TopPLogitsWarper: _ProcessorKind("top_p", _top_p),
    processors_of.MinPLogitsWarper: _ProcessorKind("min_p", _min_p),
    processors_of.EpsilonLogitsWarper: _ProcessorKind("epsilon", _epsilon),
    # a log softmax shifts all scores of a row equally
    processors_of.LogitNormalization: _ProcessorKind("shift", lambda params, processor: None),
}
_FILTERS = frozenset({"top_k", "top_p", "min_p", "epsilon"})
_NOT_AFTER = {
    "bias": {"penalty", "forced", "temperature", *_FILTERS},
    "penalty": {"penalty", "shift", *_FILTERS},
    "words": {"forced", *_FILTERS},
    "mask": _FILTERS,
    "forced": set(),
    "temperature": {"top_p", "min_p", "epsilon"},
    "top_k": {"top_p", "epsilon"},  # allowed if an earlier top-k keeps no more tokens
    "top_p": {"top_p", "min_p", "epsilon"},
    "min_p": {"epsilon"},
    "epsilon": {"epsilon"},
    "shift": set(),
}


def read_processors(processors: Any, do_sample: bool, switch_off: dict[str, str]) -> ProcessorParams:
    """Reads a list of processors. Raises a ValueError that names all that are not supported.

    ``switch_off``: class name -> the argument that keeps transformers from adding it."""
    params, refused = ProcessorParams(), []
    seen: dict[str, str] = {}  # stage -> the first processor of it
    for processor in processors:
        name = getattr(processor, "__qualname__", type(processor).__name__)  # a function has a name of its own
        hint = switch_off.get(name)
        kind = _KINDS.get(type(processor))
        if kind is None:
            refused.append(name + (f" ({hint})" if hint else ""))
            continue
        earlier = next((seen[stage] for stage in seen if stage in _NOT_AFTER[kind.stage]), None)
        if kind.stage == "top_k" and 0 < params.top_k <= read_number(processor, "top_k"):
            earlier = None
        try:
            if earlier is not None:
                raise UnsupportedProcessorError(f"it comes after {earlier}, and this order is not the fused step's")
            kind.read(params, processor)
        except UnsupportedProcessorError as error:
            refused.append(f"{name} ({hint}): {error}" if hint else f"{name}: {error}")
        seen.setdefault(kind.stage, name)
    if refused:
        raise ValueError(
            f"the fused step cannot do all of this: switch off {', '.join(refused)}, or keep it and generate without "
            "custom_generate"
        )
    if not do_sample:  # greedy: filters do not change which logit is the largest
        params.temperature, params.top_k, params.top_p, params.min_p, params.epsilon_cutoff = 0.0, 0, 1.0, 0.0, 0.0
    return params
