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
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.generation import logits_process as processors_of

from ...sampling_params import FILTER_FIELDS


class TokenRule(NamedTuple):
    """Bans tokens, or forces one, while a sequence has from ``first`` up to ``last`` tokens."""

    ids: tuple[int, ...]
    first: int = 0
    last: float = math.inf
    forced: bool = False


class ProcessorParams:
    """The parameters of a list of processors, for all sequences and lengths."""

    def __init__(self) -> None:
        self.temperature = 1.0
        self.options: dict[str, Any] = {}  # arguments of ``sample`` that are the same in every step
        self.left_out: int | Tensor = 0  # first positions that the penalty ignores, for all rows or (B,)
        # token ids and a value, which is added to the last id if the sequence ends with the other ids
        self.biases: list[tuple[tuple[int, ...], float]] = []
        self.rules: list[TokenRule] = []  # in order: later rules win
        self.ngrams: list[int] = []  # sizes of n-grams that must not repeat
        # argument, ids that the head must have for it, and the length of a sequence from which it has no effect
        self.required: list[tuple[str, tuple[int, ...], float]] = []


class UnsupportedProcessorError(ValueError):
    """The reason why a processor is not supported; ``read_processors`` puts it into its error."""


def _read_ids(processor: Any, name: str) -> tuple[int, ...]:
    """Returns the token ids of a processor's attribute, perhaps none."""
    ids = getattr(processor, name)
    return tuple(map(int, ids.tolist() if isinstance(ids, Tensor) else ids))


# -- one function per class: reads a processor into the parameters


def _temperature(params: ProcessorParams, processor: Any) -> None:
    params.temperature *= processor.temperature


def _filter(params: ProcessorParams, processor: Any, argument: str, attribute: str) -> None:
    if processor.filter_value != -math.inf:
        raise UnsupportedProcessorError(f"filter_value={processor.filter_value} does not remove a token")
    if getattr(processor, "min_tokens_to_keep", 1) != 1:  # older releases include it in top_k
        raise UnsupportedProcessorError(f"min_tokens_to_keep={processor.min_tokens_to_keep}")
    value, earlier = getattr(processor, attribute), params.options.get(argument)
    if argument == "top_k":
        value = min(value, earlier or 2**31 - 1)  # more tokens than any model has
    elif argument == "min_p":
        value = max(value, earlier or 0.0)
    params.options[argument] = value


def _penalty(params: ProcessorParams, processor: Any) -> None:
    params.options["repetition_penalty"] = processor.penalty
    left_out = getattr(processor, "prompt_ignore_length", None)  # one per row in newer releases
    params.left_out = 0 if left_out is None else left_out


def _biases(params: ProcessorParams, processor: Any, argument: str) -> None:
    """Reads biases, or banned words, which are biases of -inf."""
    for ids, value in processor.sequence_bias.items():
        if not value <= torch.finfo(torch.float32).max:
            raise UnsupportedProcessorError(f"a bias must be below infinity, got {value}")
        if not ids:  # a tokenizer's result for "": transformers ignores it (5.17 fails)
            continue
        params.required.append((argument, ids, math.inf))
        if value == -math.inf and len(ids) == 1:
            params.rules.append(TokenRule(ids))
        else:
            params.biases.append((ids, value))


def _ngrams(params: ProcessorParams, processor: Any) -> None:
    params.ngrams.append(processor.ngram_size)


def _min_length(params: ProcessorParams, processor: Any) -> None:
    params.rules.append(TokenRule(_read_ids(processor, "eos_token_id"), last=processor.min_length))


def _min_new_tokens(params: ProcessorParams, processor: Any) -> None:
    last = processor.prompt_length_to_skip + processor.min_new_tokens
    params.rules.append(TokenRule(_read_ids(processor, "eos_token_id"), last=last))


def _suppressed(params: ProcessorParams, processor: Any) -> None:
    params.rules.append(TokenRule(_read_ids(processor, "suppress_tokens")))


def _suppressed_at_begin(params: ProcessorParams, processor: Any) -> None:
    ids, begin = _read_ids(processor, "begin_suppress_tokens"), processor.begin_index
    params.rules.append(TokenRule(ids, begin, begin + 1))


def _forced_bos(params: ProcessorParams, processor: Any) -> None:
    _force(params, "forced_bos_token_id", (processor.bos_token_id,), 1)


def _forced_eos(params: ProcessorParams, processor: Any) -> None:
    _force(params, "forced_eos_token_id", _read_ids(processor, "eos_token_id"), processor.max_length - 1)


def _force(params: ProcessorParams, argument: str, ids: tuple[int, ...], length: int) -> None:
    if len(ids) != 1:
        raise UnsupportedProcessorError(
            f"one of the tokens {list(ids)} would be drawn as often as another, whatever their logits"
        )
    params.required.append((argument, ids, length + 1))
    params.rules.append(TokenRule(ids, length, length + 1, forced=True))


class _ProcessorKind(NamedTuple):
    stage: str
    read: Callable[[ProcessorParams, Any], None]


def _filter_kind(argument: str, attribute: str) -> _ProcessorKind:
    return _ProcessorKind(argument, partial(_filter, argument=argument, attribute=attribute))


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
    processors_of.TopKLogitsWarper: _filter_kind("top_k", "top_k"),
    processors_of.TopPLogitsWarper: _filter_kind("top_p", "top_p"),
    processors_of.MinPLogitsWarper: _filter_kind("min_p", "min_p"),
    processors_of.EpsilonLogitsWarper: _filter_kind("epsilon_cutoff", "epsilon"),
    # a log softmax shifts all scores of a row equally
    processors_of.LogitNormalization: _ProcessorKind("shift", lambda params, processor: None),
}
# class of a processor that a configuration may add, and that is refused (always, or for some values) -> the argument
# and the value that keep transformers from adding it
SWITCH_OFF = {
    "EncoderNoRepeatNGramLogitsProcessor": "encoder_no_repeat_ngram_size=0",
    "EncoderRepetitionPenaltyLogitsProcessor": "encoder_repetition_penalty=1.0",
    "EtaLogitsWarper": "eta_cutoff=0.0",
    "ExponentialDecayLengthPenalty": "exponential_decay_length_penalty=None",
    "ForcedEOSTokenLogitsProcessor": "forced_eos_token_id=None",
    "InfNanRemoveLogitsProcessor": "remove_invalid_values=False",
    "PrefixConstrainedLogitsProcessor": "prefix_allowed_tokens_fn=None",
    "SynthIDTextWatermarkLogitsProcessor": "watermarking_config=None",
    "TopHLogitsWarper": "top_h=None",
    "TopKLogitsWarper": "top_k=0",
    "TypicalLogitsWarper": "typical_p=1.0",
    "UnbatchedClassifierFreeGuidanceLogitsProcessor": "guidance_scale=None",
    "WatermarkLogitsProcessor": "watermarking_config=None",
}
_NOT_AFTER = {
    "bias": {"penalty", "forced", "temperature", *FILTER_FIELDS},
    "penalty": {"penalty", "shift", *FILTER_FIELDS},
    "words": {"forced", *FILTER_FIELDS},
    "mask": {*FILTER_FIELDS},
    "forced": set(),
    "temperature": {"top_p", "min_p", "epsilon_cutoff"},
    "top_k": {"top_p", "epsilon_cutoff"},  # allowed if an earlier top-k keeps no more tokens
    "top_p": {"top_p", "min_p", "epsilon_cutoff"},
    "min_p": {"epsilon_cutoff"},
    "epsilon_cutoff": {"epsilon_cutoff"},
    "shift": set(),
}


def read_processors(processors: Any, do_sample: bool) -> ProcessorParams:
    """Reads a list of processors. Raises a ValueError that names all that are not supported."""
    params, refused = ProcessorParams(), []
    seen: dict[str, str] = {}  # stage -> the first processor of it
    for processor in processors:
        name = getattr(processor, "__qualname__", type(processor).__name__)  # a function has a name of its own
        label = f"{name} ({SWITCH_OFF[name]})" if name in SWITCH_OFF else name
        kind = _KINDS.get(type(processor))
        if kind is None:
            refused.append(label)
            continue
        earlier = next((seen[stage] for stage in seen if stage in _NOT_AFTER[kind.stage]), None)
        if kind.stage == "top_k" and (params.options.get("top_k") or math.inf) <= processor.top_k:
            earlier = None
        try:
            if earlier is not None:
                raise UnsupportedProcessorError(f"it comes after {earlier}, and this order is not the fused step's")
            kind.read(params, processor)
        except UnsupportedProcessorError as error:
            refused.append(f"{label}: {error}")
        seen.setdefault(kind.stage, name)
    if refused:
        raise ValueError(
            f"the fused step cannot do all of this: switch off {', '.join(refused)}, or keep it and generate without "
            "custom_generate"
        )
    if not do_sample:  # greedy: filters do not change which logit is the largest
        params.temperature = 0.0
        for name in FILTER_FIELDS:
            params.options.pop(name, None)
    return params
