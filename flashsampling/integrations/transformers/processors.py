"""Logits processors of transformers as arguments of the sampler: the same tokens with the same logits, or an error by name.

transformers hands a list of processors the logits of every step, one after the other. ``sample`` knows one order: bias,
repetition penalty, mask, temperature, top-k, top-p, min-p. ``taken`` reads a list into that order where both make the same of
every logit, which ``_NOT_AFTER`` decides:

    a bias         must be added before a penalty and a temperature change what it is added to
    a mask         is -inf, which no bias, penalty or temperature changes; but before it filters would keep other tokens
    a temperature  changes no order and no sign, so penalties and top-k may come before it; the masses of top-p and min-p do
    top-k, min-p   in either order the same: both keep those above a line, and the first token's probability stays
    top-p          counts the mass of what is left, so what comes before it matters, and not what comes after

Instances are read, not configurations: their attributes are what transformers would have computed with. All of them are the
same for all rows and change with a sequence's length alone, but for biases after a prefix (words of several tokens) and
n-grams that would come again, which are looked up on the device.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.generation import logits_process as processors_of

from ...counts import TokenCounts
from ...requests import MAX_BIASED, Problem, Request, asked_of

# of a request, what a GenerationConfig has no field for, or one for all rows alone
PER_ROW = (
    *("logit_bias", "repetition_penalty", "frequency_penalty", "presence_penalty", "token_mask", "top_k", "top_p", "min_p"),
)
_PENALTIES = ("repetition_penalty", "frequency_penalty", "presence_penalty")


class _Rule(NamedTuple):
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
        self.rules: list[_Rule] = []
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
    if processor.min_tokens_to_keep != 1:
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
            taken.rules.append(_Rule((int(ids[0]),)))
        else:
            taken.biases.append((tuple(map(int, ids)), value))


def _ngrams(taken: Taken, processor: Any) -> None:
    taken.ngrams.append(processor.ngram_size)


def _min_length(taken: Taken, processor: Any) -> None:
    taken.rules.append(_Rule(_ids(processor.eos_token_id), last=processor.min_length))


def _min_new_tokens(taken: Taken, processor: Any) -> None:
    last = processor.prompt_length_to_skip + processor.min_new_tokens
    taken.rules.append(_Rule(_ids(processor.eos_token_id), last=last))


def _suppressed(taken: Taken, processor: Any) -> None:
    taken.rules.append(_Rule(_ids(processor.suppress_tokens)))


def _suppressed_at_begin(taken: Taken, processor: Any) -> None:
    begin = processor.begin_index
    taken.rules.append(_Rule(_ids(processor.begin_suppress_tokens), begin, begin + 1))


def _forced_bos(taken: Taken, processor: Any) -> None:
    taken.rules.append(_forced((int(processor.bos_token_id),), 1))


def _forced_eos(taken: Taken, processor: Any) -> None:
    taken.rules.append(_forced(_ids(processor.eos_token_id), processor.max_length - 1))


def _forced(ids: tuple[int, ...], length: int) -> _Rule:
    if len(ids) != 1:
        raise Unmapped(f"one of the tokens {list(ids)} would be drawn as often as another, whatever their logits")
    return _Rule(ids, length, length + 1, forced=True)


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
    "forced": _FILTERS,
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
        name = type(processor).__name__
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


# -- and of the sequences as they are


class Requests:
    """The sampler's arguments, step for step."""

    def __init__(
        self,
        taken: Taken,
        prompt: Tensor,  # (B, T)
        vocab_size: int,
        device: torch.device,  # the LM head's
        given: Request,
    ) -> None:
        """``given`` takes the place of what was taken. ValueError or TypeError for what it has no place for or ``sample`` does
        not take, for tokens that the head does not have, and for more biases than a step takes."""
        self.vocab_size, self.device = vocab_size, device
        self._constant: Request = {}
        if taken.top_k:
            self._constant["top_k"] = taken.top_k
        if taken.top_p < 1:
            self._constant["top_p"] = taken.top_p
        if taken.min_p > 0:
            self._constant["min_p"] = taken.min_p
        self._ngrams = taken.ngrams
        self._rules, self._masks = taken.rules, {}  # type: ignore[var-annotated] # which rules are at work -> their mask
        self._require_tokens(
            {id for ids, _ in taken.biases for id in ids} | {i for r in taken.rules if r.forced for i in r.ids}
        )
        self._values, self._prefixes = self._biases(taken.biases, prompt.device)
        self._counts, self._left_out = None, taken.left_out
        if taken.repetition_penalty != 1.0 or any(given.get(name) is not None for name in _PENALTIES):
            self._counts = self._counted(prompt)
            self._constant["token_counts"] = self._counts.counts[: len(prompt)]
            self._constant["repetition_penalty"] = taken.repetition_penalty
        self._constant |= self._checked(given, len(prompt))

    def at(
        self,
        input_ids: Tensor,  # (B, T)
    ) -> Request:
        """For the token behind these."""
        request: Request = {**self._constant}
        at_work = [rule for rule in self._rules if rule.first <= input_ids.shape[1] < rule.last]
        masks = [self._mask(tuple(at_work))] if at_work else []
        if not any(rule.forced for rule in at_work):  # which nothing before it could prevent
            masks += [self._new(input_ids, size) for size in self._ngrams if size <= input_ids.shape[1]]
            if self._values is not None:
                request["logit_bias"] = self._matching(input_ids)
        for mask in masks:
            given = request.get("token_mask")
            request["token_mask"] = mask if given is None else mask & given[..., : mask.shape[-1]]
        return request

    def drawn(
        self,
        token_ids: Tensor,  # (B,)
        position: int,
    ) -> None:
        """Counts what was drawn."""
        if self._counts is not None:
            self._counts.add(torch.where(self._counting(position, token_ids.device), token_ids, -1).to(self.device))

    def _checked(self, given: Request, batch: int) -> Request:
        """The same, checked, and on the device."""
        for name in given:
            if name not in PER_ROW:
                raise ValueError(f"request has {', '.join(PER_ROW)}, got {name!r}")
        wanted: Request = {**given}
        if self._counts is not None:
            wanted["token_counts"] = self._counts.counts[:batch]
        asked = asked_of(wanted, Problem(batch, self.vocab_size, self.vocab_size, self.device, 1))
        checked: Any = {name: getattr(asked, name) for name in given if name != "logit_bias"}
        if given.get("logit_bias") is not None:
            if self._values is not None:
                raise ValueError("logit_bias must not be in request with sequence_bias, or bad_words_ids of several tokens")
            pair = None if asked.bias_ids is None else (asked.bias_ids, asked.bias_values)
            checked["logit_bias"] = pair if asked.dense_bias is None else asked.dense_bias
        return checked  # type: ignore[no-any-return]

    def _require_tokens(self, ids: set[int]) -> None:
        others = sorted(token for token in ids if not 0 <= token < self.vocab_size)
        if others:
            raise ValueError(f"the model has {self.vocab_size} tokens; biased or forced are {others}")

    def _counting(self, positions: Tensor | int, device: torch.device) -> Tensor:
        """Which positions the penalty takes account of: (B, n), or of one for all rows (1,) or (B,)."""
        left_out = torch.as_tensor(self._left_out, device=device)
        if isinstance(positions, Tensor) and left_out.ndim:
            left_out = left_out[:, None]
        return positions >= left_out

    def _counted(self, prompt: Tensor) -> TokenCounts:
        counts = TokenCounts(max(len(prompt), 1), self.vocab_size, self.device)
        positions = torch.arange(prompt.shape[1], device=prompt.device)
        ids = torch.where(self._counting(positions, prompt.device), prompt, -1)
        counts.reset(rows=slice(0, len(prompt)), prompt_token_ids=ids)
        return counts

    def _mask(self, at_work: tuple[_Rule, ...]) -> Tensor:
        """(ceil(V / 32),) int32, for all rows."""
        if at_work not in self._masks:
            allowed = torch.ones(-(-self.vocab_size // 32) * 32, dtype=torch.bool)
            for rule in at_work:
                if rule.forced:
                    allowed[:] = False
                allowed[[token for token in rule.ids if 0 <= token < self.vocab_size]] = rule.forced
            words = (allowed.view(-1, 32).long() << torch.arange(32)).sum(dim=1)
            self._masks[at_work] = _int32(words).to(self.device)
        return self._masks[at_work]  # type: ignore[no-any-return]

    def _new(self, input_ids: Tensor, size: int) -> Tensor:
        """(B, ceil(V / 32)) int32: tokens that do not complete an n-gram that is there already."""
        ngrams = input_ids.unfold(1, size, 1)  # (B, T - size + 1, size)
        end = input_ids[:, None, input_ids.shape[1] - size + 1 :]
        again = torch.where((ngrams[..., :-1] == end).all(dim=-1), ngrams[..., -1], -1)
        again = again.to(self.device).sort(dim=1).values
        there = (again >= 0) & (again < self.vocab_size)
        there[:, 1:] &= again[:, 1:] != again[:, :-1]  # once each: the sum of their bits is then all of them
        again = torch.where(there, again, 0)
        words = torch.zeros(len(again), -(-self.vocab_size // 32), dtype=torch.int64, device=self.device)
        words.scatter_add_(1, again >> 5, there.long() << (again & 31))
        return _int32(~words & 0xFFFFFFFF)

    def _biases(self, biases: list[tuple[tuple[int, ...], float]], device: torch.device) -> tuple[Tensor | None, list[Any]]:
        """Values (n,), and by length of what has to come before, prefixes (m, length) and last tokens (m,), n in all. Where
        more tokens are biased than a row takes, and none waits for a prefix: values (V,) of all, and no prefixes."""
        if not biases:
            return None, []
        if len(biases) > MAX_BIASED:
            if any(len(ids) > 1 for ids, _ in biases):
                raise ValueError(
                    f"sequence_bias and bad_words_ids must be at most {MAX_BIASED} where one is of several tokens, got "
                    f"{len(biases)}"
                )
            dense = torch.zeros(self.vocab_size)
            for (token,), value in biases:
                dense[token] += value
            return dense.to(self.device), []
        biases = sorted(biases, key=lambda bias: len(bias[0]))
        values = torch.tensor([value for _, value in biases], dtype=torch.float32, device=self.device)
        prefixes = []
        for length in sorted({len(ids) for ids, _ in biases}):
            ids = torch.tensor([ids for ids, _ in biases if len(ids) == length], device=device)
            prefixes.append((ids[:, :-1], ids[:, -1]))
        return values, prefixes

    def _matching(self, input_ids: Tensor) -> Any:
        """``logit_bias``."""
        if not self._prefixes:
            return self._values
        ids = []
        for prefix, last in self._prefixes:
            length = prefix.shape[1]
            if length > input_ids.shape[1]:
                ids.append(torch.full((len(input_ids), len(last)), -1, device=input_ids.device))
            else:
                end = input_ids[:, None, input_ids.shape[1] - length :]
                ids.append(torch.where((end == prefix).all(dim=-1), last, -1))
        assert self._values is not None
        return torch.cat(ids, dim=1).to(self.device), self._values.expand(len(input_ids), -1)


def _int32(words: Tensor) -> Tensor:
    """The same 32 bits, of words from 0 to 2**32 - 1."""
    return torch.where(words < 2**31, words, words - 2**32).to(torch.int32)
