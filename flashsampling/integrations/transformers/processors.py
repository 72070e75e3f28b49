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
from typing import Any, NamedTuple

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
    """

    def __init__(self) -> None:
        self.temperature, self.top_k, self.top_p, self.min_p, self.repetition_penalty = 1.0, 0, 1.0, 0.0, 1.0
        self.left_out: int | Tensor = 0
        self.biases: list[tuple[tuple[int, ...], float]] = []
        self.rules: list[Rule] = []
        self.ngrams: list[int] = []


class Unmapped(ValueError):
    """Why a processor cannot be taken; ``taken`` puts it into the error."""


# -- what each class asks for


def _temperature(taken: Taken, processor: Any) -> None:
    taken.temperature *= float(processor.temperature)


def _top_k(taken: Taken, processor: Any) -> None:
    _require_plain_filter(processor)
    taken.top_k = min(taken.top_k or processor.top_k, processor.top_k)


def _top_p(taken: Taken, processor: Any) -> None:
    _require_plain_filter(processor)
    taken.top_p = float(processor.top_p)


def _min_p(taken: Taken, processor: Any) -> None:
    _require_plain_filter(processor)
    taken.min_p = max(taken.min_p, float(processor.min_p))


def _require_plain_filter(processor: Any) -> None:
    if processor.filter_value != -math.inf:
        raise Unmapped(f"filter_value={processor.filter_value} does not remove a token")
    if getattr(processor, "min_tokens_to_keep", 1) != 1:  # in older releases top-k has it in its top_k
        raise Unmapped(f"min_tokens_to_keep={processor.min_tokens_to_keep}")


def _penalty(taken: Taken, processor: Any) -> None:
    taken.repetition_penalty = float(processor.penalty)
    left_out = getattr(processor, "prompt_ignore_length", None)
    taken.left_out = 0 if left_out is None else left_out


def _biases(taken: Taken, processor: Any) -> None:
    """Of a ``NoBadWordsLogitsProcessor`` too, where every one is -inf."""
    for ids, value in processor.sequence_bias.items():
        value = float(value)
        if not value < math.inf:
            raise Unmapped(f"a bias must be below infinity, got {value}")
        if value == -math.inf and len(ids) == 1:
            taken.rules.append(Rule((int(ids[0]),)))
        else:
            taken.biases.append((tuple(map(int, ids)), value))


def _ngrams(taken: Taken, processor: Any) -> None:
    taken.ngrams.append(processor.ngram_size)


def _min_length(taken: Taken, processor: Any) -> None:
    taken.rules.append(Rule(_ids(processor.eos_token_id), last=processor.min_length))


def _min_new_tokens(taken: Taken, processor: Any) -> None:
    last = processor.prompt_length_to_skip + processor.min_new_tokens
    taken.rules.append(Rule(_ids(processor.eos_token_id), last=last))


def _suppressed(taken: Taken, processor: Any) -> None:
    taken.rules.append(Rule(_ids(processor.suppress_tokens)))


def _suppressed_at_begin(taken: Taken, processor: Any) -> None:
    begin = processor.begin_index
    taken.rules.append(Rule(_ids(processor.begin_suppress_tokens), begin, begin + 1))


def _forced_bos(taken: Taken, processor: Any) -> None:
    taken.rules.append(_forced((int(processor.bos_token_id),), 1))


def _forced_eos(taken: Taken, processor: Any) -> None:
    taken.rules.append(_forced(_ids(processor.eos_token_id), processor.max_length - 1))


def _forced(ids: tuple[int, ...], length: int) -> Rule:
    if len(ids) != 1:
        raise Unmapped(f"one of the tokens {list(ids)} would be drawn as often as another, whatever their logits")
    return Rule(ids, length, length + 1, forced=True)


def _nothing(taken: Taken, processor: Any) -> None:
    """A log softmax moves all of a row's scores alike."""


def _ids(ids: Tensor) -> tuple[int, ...]:
    return tuple(ids.reshape(-1).tolist())


class _Kind(NamedTuple):
    stage: str
    take: Callable[[Taken, Any], None]


_KINDS = {
    processors_of.SequenceBiasLogitsProcessor: _Kind("bias", _biases),
    processors_of.RepetitionPenaltyLogitsProcessor: _Kind("penalty", _penalty),
    processors_of.NoBadWordsLogitsProcessor: _Kind("words", _biases),
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
        if kind.stage == "top_k" and 0 < taken.top_k <= processor.top_k:
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
