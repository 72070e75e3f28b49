"""Logits processors of transformers as arguments of the sampler: the same tokens with the same logits, or an error by name.

transformers hands a list of processors the logits of every step, one after the other. ``sample`` knows one order: bias,
repetition penalty, mask, temperature, top-k, top-p, min-p. ``taken`` reads a list into that order where both make the same of
every logit, which ``_NOT_AFTER`` decides; ``request`` has the arguments:

    a bias         must be added before a penalty and a temperature change what it is added to
    a mask         is -inf, which no bias, penalty or temperature changes; but before it filters would keep other tokens
    a temperature  changes no order and no sign, so it is the same before and after a penalty, a mask and top-k; but the masses
                   of top-p and min-p change with it
    top-k, min-p   in either order the same: both keep those above a line, and the first token's probability stays
    top-p          counts the mass of what is left, so what comes before it matters, and not what comes after

Instances are read, not configurations: their attributes are what transformers would have computed with. All of them are the
same for all rows and change with a sequence's length alone, but for biases after a prefix (words of several tokens) and
n-grams that would come again, which ``request`` looks up on the device.
"""

import math
from collections.abc import Callable
from numbers import Integral, Real
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.generation import logits_process as processors_of


class Rule(NamedTuple):
    """Tokens that may not be drawn, or the only one that may, while a sequence has from ``first`` up to ``last`` tokens."""

    ids: tuple[int, ...]
    first: int = 0
    last: float = math.inf
    forced: bool = False


class Taken:
    """What a list of processors asks for, but for what it makes of one sequence at one length.

    Attributes:
        temperature, top_k, top_p, min_p, repetition_penalty: as in ``flashsampling.sample``.
        left_out: so many positions at the beginning that the penalty leaves out: for all rows, or (B,).
        biases: token ids, the last of which has the value added where the sequence ends with the others.
        rules: in order; the later one wins.
        ngrams: of so many tokens none may come twice.
        required: an argument, ids that the head must have for it, and from which length of a sequence on it has no effect.
    """

    def __init__(self) -> None:
        self.temperature, self.top_k, self.top_p, self.min_p, self.repetition_penalty = 1.0, 0, 1.0, 0.0, 1.0
        self.left_out: int | Tensor = 0
        self.biases: list[tuple[tuple[int, ...], float]] = []
        self.rules: list[Rule] = []
        self.ngrams: list[int] = []
        self.required: list[tuple[str, tuple[int, ...], float]] = []


class Unmapped(ValueError):
    """Why a processor cannot be taken; ``taken`` puts it into the error."""


# -- what each class holds, checked: its attributes may have been written to since it was made

_SMALLEST, _MAX_FLOAT32 = math.ulp(0.0), torch.finfo(torch.float32).max
_RANGES: dict[str, tuple[Any, float, float]] = {
    "temperature": (Real, _SMALLEST, math.inf),
    "top_k": (Integral, 1, math.inf),
    "top_p": (Real, 0, 1),
    "min_p": (Real, 0, 1),
    "penalty": (Real, _SMALLEST, _MAX_FLOAT32),
    "prompt_ignore_length": (Integral, 0, math.inf),
    "ngram_size": (Integral, 1, math.inf),
    "min_length": (Integral, 0, math.inf),
    "prompt_length_to_skip": (Integral, 0, math.inf),
    "min_new_tokens": (Integral, 0, math.inf),
    "begin_index": (Integral, 0, math.inf),
    "max_length": (Integral, 0, math.inf),
}


def number_of(processor: Any, name: str) -> Any:
    """A processor's attribute. ValueError unless it is a number in the range that transformers takes."""
    kind, least, most = _RANGES[name]
    value = getattr(processor, name, None)
    if not isinstance(value, kind) or not least <= value <= most:  # NaN too
        ends = "above 0" if least == _SMALLEST else f"{least} or more"
        ends += "" if most == math.inf else f", up to {most:g}"
        wanted = "an integer" if kind is Integral else "a number"
        raise ValueError(f"{type(processor).__name__}: {name} must be {wanted}, {ends}, got {value!r}")
    return int(value) if kind is Integral else float(value)


def ids_of(processor: Any, name: str, ids: Any) -> tuple[int, ...]:
    """Token ids, none or more. ValueError for what is no integer."""
    if isinstance(ids, Tensor):
        ids = ids.reshape(-1).tolist()  # of an empty list torch makes floats
    if not isinstance(ids, (list, tuple)) or not all(isinstance(token, Integral) for token in ids):
        raise ValueError(f"{type(processor).__name__}: {name} must hold token ids, which are integers, got {ids!r}")
    return tuple(map(int, ids))


# -- what each class asks for


def _temperature(taken: Taken, processor: Any) -> None:
    taken.temperature *= number_of(processor, "temperature")


def _top_k(taken: Taken, processor: Any) -> None:
    _require_plain_filter(processor)
    taken.top_k = min(taken.top_k or 2**31 - 1, number_of(processor, "top_k"))  # more tokens than any model has


def _top_p(taken: Taken, processor: Any) -> None:
    _require_plain_filter(processor)
    taken.top_p = number_of(processor, "top_p")


def _min_p(taken: Taken, processor: Any) -> None:
    _require_plain_filter(processor)
    taken.min_p = max(taken.min_p, number_of(processor, "min_p"))


def _require_plain_filter(processor: Any) -> None:
    filter_value = getattr(processor, "filter_value", None)
    if filter_value != -math.inf:
        raise Unmapped(f"filter_value={filter_value} does not remove a token")
    if getattr(processor, "min_tokens_to_keep", 1) != 1:  # in older releases top-k has it in its top_k
        raise Unmapped(f"min_tokens_to_keep={processor.min_tokens_to_keep}")


def _penalty(taken: Taken, processor: Any) -> None:
    taken.repetition_penalty = number_of(processor, "penalty")
    left_out = getattr(processor, "prompt_ignore_length", None)
    if isinstance(left_out, Tensor) and left_out.ndim == 1 and not left_out.is_complex():  # one per row
        taken.left_out = left_out
    else:
        taken.left_out = 0 if left_out is None else number_of(processor, "prompt_ignore_length")


def _biases(taken: Taken, processor: Any) -> None:
    _add_biases(taken, processor, "sequence_bias")


def _bad_words(taken: Taken, processor: Any) -> None:
    """Biases of -inf, every one."""
    _add_biases(taken, processor, "bad_words_ids")


def _add_biases(taken: Taken, processor: Any, argument: str) -> None:
    biases = getattr(processor, "sequence_bias", None)  # of either class, which have made a dictionary of it
    if not isinstance(biases, dict):
        raise ValueError(f"{type(processor).__name__}: sequence_bias must be a dictionary, got {biases!r}")
    for given, value in biases.items():
        ids = ids_of(processor, argument, given)
        if not isinstance(value, Real):
            raise ValueError(f"{type(processor).__name__}: {argument} must have numbers as biases, got {value!r}")
        value = float(value)
        if not value <= _MAX_FLOAT32:
            raise Unmapped(f"a bias must be below infinity, got {value}")
        if not ids:  # what a tokenizer makes of "": transformers ignores it (5.17 fails)
            continue
        taken.required.append((argument, ids, math.inf))
        if value == -math.inf and len(ids) == 1:
            taken.rules.append(Rule(ids))
        else:
            taken.biases.append((ids, value))


def _ngrams(taken: Taken, processor: Any) -> None:
    taken.ngrams.append(number_of(processor, "ngram_size"))


def _min_length(taken: Taken, processor: Any) -> None:
    ids = ids_of(processor, "eos_token_id", getattr(processor, "eos_token_id", None))
    taken.rules.append(Rule(ids, last=number_of(processor, "min_length")))


def _min_new_tokens(taken: Taken, processor: Any) -> None:
    last = number_of(processor, "prompt_length_to_skip") + number_of(processor, "min_new_tokens")
    taken.rules.append(Rule(ids_of(processor, "eos_token_id", getattr(processor, "eos_token_id", None)), last=last))


def _suppressed(taken: Taken, processor: Any) -> None:
    taken.rules.append(Rule(ids_of(processor, "suppress_tokens", getattr(processor, "suppress_tokens", None))))


def _suppressed_at_begin(taken: Taken, processor: Any) -> None:
    begin = number_of(processor, "begin_index")
    ids = ids_of(processor, "begin_suppress_tokens", getattr(processor, "begin_suppress_tokens", None))
    taken.rules.append(Rule(ids, begin, begin + 1))


def _forced_bos(taken: Taken, processor: Any) -> None:
    ids = ids_of(processor, "forced_bos_token_id", (getattr(processor, "bos_token_id", None),))
    _force(taken, "forced_bos_token_id", ids, 1)


def _forced_eos(taken: Taken, processor: Any) -> None:
    ids = ids_of(processor, "forced_eos_token_id", getattr(processor, "eos_token_id", None))
    _force(taken, "forced_eos_token_id", ids, number_of(processor, "max_length") - 1)


def _force(taken: Taken, argument: str, ids: tuple[int, ...], length: int) -> None:
    if not ids:
        raise ValueError(f"{argument} must be a token id, got none")
    if len(ids) > 1:
        raise Unmapped(f"one of the tokens {list(ids)} would be drawn as often as another, whatever their logits")
    taken.required.append((argument, ids, length + 1))
    taken.rules.append(Rule(ids, length, length + 1, forced=True))


def _nothing(taken: Taken, processor: Any) -> None:
    """A log softmax moves all of a row's scores alike."""


class _Kind(NamedTuple):
    stage: str
    take: Callable[[Taken, Any], None]


_KINDS = {
    processors_of.SequenceBiasLogitsProcessor: _Kind("bias", _biases),
    processors_of.RepetitionPenaltyLogitsProcessor: _Kind("penalty", _penalty),
    processors_of.NoBadWordsLogitsProcessor: _Kind("words", _bad_words),
    processors_of.NoRepeatNGramLogitsProcessor: _Kind("words", _ngrams),
    processors_of.MinLengthLogitsProcessor: _Kind("mask", _min_length),
    processors_of.MinNewTokensLengthLogitsProcessor: _Kind("mask", _min_new_tokens),
    processors_of.SuppressTokensLogitsProcessor: _Kind("mask", _suppressed),
    processors_of.SuppressTokensAtBeginLogitsProcessor: _Kind("mask", _suppressed_at_begin),
    processors_of.ForcedBOSTokenLogitsProcessor: _Kind("forced", _forced_bos),
    processors_of.ForcedEOSTokenLogitsProcessor: _Kind("forced", _forced_eos),
    processors_of.TemperatureLogitsWarper: _Kind("temperature", _temperature),
    processors_of.TopKLogitsWarper: _Kind("top_k", _top_k),
    processors_of.TopPLogitsWarper: _Kind("top_p", _top_p),
    processors_of.MinPLogitsWarper: _Kind("min_p", _min_p),
    processors_of.LogitNormalization: _Kind("shift", _nothing),
}
_FILTERS = frozenset({"top_k", "top_p", "min_p"})
_NOT_AFTER = {
    "bias": {"penalty", "forced", "temperature", *_FILTERS},
    "penalty": {"penalty", "shift", *_FILTERS},
    "words": {"forced", *_FILTERS},
    "mask": _FILTERS,
    "forced": set(),
    "temperature": {"top_p", "min_p"},
    "top_k": {"top_p"},  # but for one that keeps no fewer than an earlier one has
    "top_p": {"top_p", "min_p"},
    "min_p": set(),
    "shift": set(),
}


def taken(processors: Any, do_sample: bool, switch_off: dict[str, str]) -> Taken:
    """What a list of processors asks for. ValueError that names those that cannot be taken, none of which may be dropped
    silently; ``switch_off``: a class's name -> what keeps transformers from adding it."""
    taken, refused = Taken(), []
    seen: dict[str, str] = {}  # stage -> the first processor of it
    for processor in processors:
        name = getattr(processor, "__qualname__", type(processor).__name__)  # a function's own
        hint = switch_off.get(name)
        kind = _KINDS.get(type(processor))
        if kind is None:
            refused.append(name + (f" ({hint})" if hint else ""))
            continue
        earlier = next((seen[stage] for stage in seen if stage in _NOT_AFTER[kind.stage]), None)
        if kind.stage == "top_k" and 0 < taken.top_k <= number_of(processor, "top_k"):
            earlier = None
        try:
            if earlier is not None:
                raise Unmapped(f"it comes after {earlier}, and this order is not the fused step's")
            kind.take(taken, processor)
        except Unmapped as error:
            refused.append(f"{name} ({hint}): {error}" if hint else f"{name}: {error}")
        seen.setdefault(kind.stage, name)
    if refused:
        raise ValueError(
            f"the fused step cannot do all of this: switch off {', '.join(refused)}, or keep it and generate without "
            "custom_generate"
        )
    if not do_sample:  # what is left does not change which logit is the largest
        taken.temperature, taken.top_k, taken.top_p, taken.min_p = 0.0, 0, 1.0, 0.0
    return taken
