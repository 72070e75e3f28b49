"""Makes the sampler's arguments for each step from transformers' processors."""

from typing import Any

import torch
from torch import Tensor

from ...param_parsers import MAX_BIASED, BatchShape
from ...reference.logit_transforms import pack_bits
from ...sampling_params import PENALTIES, ROW_FIELDS, SamplingOptions, parse_sampling_params, unexpected_argument
from ...token_counts import TokenCounts
from .processors import ProcessorParams, TokenRule

# arguments of ``generate(request=...)``: a GenerationConfig has no field for them, or only a scalar one
PER_ROW = ("logit_bias", "token_mask", *(name for name in ROW_FIELDS if name != "joint_top_p"))


class StepParams:
    """The sampler's arguments, step by step."""

    def __init__(
        self,
        params: ProcessorParams,
        prompt: Tensor,  # (B, T)
        vocab_size: int,
        device: torch.device,  # the LM head's
        given: SamplingOptions,
        attention_mask: Tensor | None = None,
    ) -> None:
        """``given`` replaces parameters of the processors.

        Raises ValueError or TypeError for arguments that ``sample`` refuses, for tokens that the head does not have,
        and for more biases than a step takes."""
        self.vocab_size, self.device = vocab_size, device
        if not isinstance(given, dict):
            raise TypeError(f"request must be a dictionary, got {type(given).__name__}")
        self._ngrams = params.ngrams
        self._rules, self._masks = params.rules, {}  # type: ignore[var-annotated] # active rules -> their mask
        self._require_tokens(params, prompt.shape[1])
        self._values, self._prefixes = self._biases(params.biases, prompt.device)
        self._counts, self._left_out = None, params.left_out
        if given.get("repetition_penalty") is not None and "repetition_penalty" not in params.options:
            # transformers has no processor then, and the penalty ignores padding
            self._left_out = _padding(attention_mask, prompt)
        options: dict[str, Any] = params.options | given
        if any(options.get(name) is not None for name in PENALTIES):
            self._counts = self._counted(prompt)
            options["token_counts"] = self._counts.read(len(prompt))
        self._constant = self._checked(options, given, len(prompt))

    def at(
        self,
        input_ids: Tensor,  # (B, T)
    ) -> SamplingOptions:
        """Returns the arguments for the token behind ``input_ids``."""
        request: SamplingOptions = {**self._constant}
        active = [rule for rule in self._rules if rule.first <= input_ids.shape[1] < rule.last]
        masks = [self._mask(tuple(active))] if active else []
        if not any(rule.forced for rule in active):  # a forced token overrides all else
            masks += [self._new(input_ids, size) for size in self._ngrams if size <= input_ids.shape[1]]
            if self._values is not None:
                request["logit_bias"] = self._matching(input_ids)
        for mask in masks:
            given = request.get("token_mask")
            request["token_mask"] = mask if given is None else mask & given[..., : mask.shape[-1]]
        return request

    def over(
        self,
        input_ids: Tensor,  # (B, T)
        drafts: Tensor,  # (B, n)
    ) -> tuple[SamplingOptions, int]:
        """Returns the arguments of ``verify`` for the tokens behind the text and each draft, and the number of drafts
        used.

        Drafts end where a bias depends on them: a request has the same biases at all positions. ``verify`` adds the
        drafts to token counts itself."""
        drafted = drafts.shape[1]
        if self._counts is not None and not bool(self._counting(input_ids.shape[1], input_ids.device).all()):
            drafted = 0  # with a prompt of embeddings the penalty ignores the first new tokens; ``verify`` would not
        text, first, masks = input_ids, self.at(input_ids), []
        for place in range(drafted + 1):
            request = self.at(text) if place else first
            if not _same_biases(request.get("logit_bias"), first.get("logit_bias")):
                drafted = place - 1
                break
            masks.append(request.get("token_mask"))
            text = torch.cat([text, drafts[:, place : place + 1]], dim=1)
        if any(mask is not masks[0] for mask in masks):
            shape = len(input_ids), -(-self.vocab_size // 32)
            every = torch.full(shape, -1, dtype=torch.int32, device=self.device)
            rows = [every if mask is None else mask[..., : shape[1]].expand(shape) for mask in masks]
            first["token_mask"] = torch.stack(rows, dim=1)
        return first, drafted

    def count(
        self,
        token_ids: Tensor,  # (B,)
        position: int,
    ) -> None:
        """Counts the drawn tokens."""
        if self._counts is not None:
            self._counts.add(torch.where(self._counting(position, token_ids.device), token_ids, -1).to(self.device))

    def _checked(self, options: dict[str, Any], given: SamplingOptions, batch: int) -> SamplingOptions:
        """Returns the options after a check, on the device."""
        for name in given:
            if name not in PER_ROW:
                raise unexpected_argument(
                    name, None, [other for other in SamplingOptions.__annotations__ if other not in PER_ROW]
                )
        params = parse_sampling_params(options, BatchShape(batch, self.vocab_size, self.vocab_size, self.device, 1))
        checked: Any = {name: getattr(params, name) for name in options if name not in ("logit_bias", "token_counts")}
        if self._counts is not None:
            checked["token_counts"] = options["token_counts"]
        if given.get("logit_bias") is not None:
            if self._values is not None:
                raise ValueError(
                    "logit_bias must not be in request with sequence_bias, or bad_words_ids of several tokens"
                )
            pair = None if params.bias_ids is None else (params.bias_ids, params.bias_values)
            checked["logit_bias"] = pair if params.dense_bias is None else params.dense_bias
        return checked  # type: ignore[no-any-return]

    def _require_tokens(self, params: ProcessorParams, length: int) -> None:
        for argument, ids, last in params.required:
            others = [token for token in ids if not 0 <= token < self.vocab_size]
            if others and length < last:
                raise ValueError(
                    f"{argument} must hold ids from 0 to {self.vocab_size - 1} with this model, got {others}"
                )

    def _counting(self, positions: Tensor | int, device: torch.device) -> Tensor:
        """Returns which positions the penalty counts: (B, n); for one position (1,) or (B,)."""
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

    def _mask(self, active: tuple[TokenRule, ...]) -> Tensor:
        """Returns the mask of active rules for all rows, (ceil(V / 32),) int32."""
        if active not in self._masks:
            allowed = torch.ones(-(-self.vocab_size // 32) * 32, dtype=torch.bool)
            for rule in active:
                if rule.forced:
                    allowed[:] = False
                allowed[[token for token in rule.ids if 0 <= token < self.vocab_size]] = rule.forced
            self._masks[active] = pack_bits(allowed[None])[0].to(self.device, torch.int32)
        return self._masks[active]  # type: ignore[no-any-return]

    def _new(self, input_ids: Tensor, size: int) -> Tensor:
        """Returns the mask of tokens that do not repeat an n-gram, (B, ceil(V / 32)) int32."""
        ngrams = input_ids.unfold(1, size, 1)  # (B, T - size + 1, size)
        end = input_ids[:, None, input_ids.shape[1] - size + 1 :]
        again = torch.where((ngrams[..., :-1] == end).all(dim=-1), ngrams[..., -1], -1)
        again = again.to(self.device).sort(dim=1).values
        there = (again >= 0) & (again < self.vocab_size)
        there[:, 1:] &= again[:, 1:] != again[:, :-1]  # each id once, so that adding bits is the same as combining them
        again = torch.where(there, again, 0)
        words = torch.zeros(len(again), -(-self.vocab_size // 32), dtype=torch.int64, device=self.device)
        words.scatter_add_(1, again >> 5, there.long() << (again & 31))
        return _int32(~words & 0xFFFFFFFF)

    def _biases(
        self, biases: list[tuple[tuple[int, ...], float]], device: torch.device
    ) -> tuple[Tensor | None, list[Any]]:
        """Returns values (n,), and for each prefix length prefixes (m, length) and last tokens (m,), n in all.

        If there are more biases than a row takes and none has a prefix, returns values (V,) and no prefixes."""
        if not biases:
            return None, []
        if len(biases) > MAX_BIASED:
            if any(len(ids) > 1 for ids, _ in biases):
                raise ValueError(
                    f"sequence_bias and bad_words_ids must be at most {MAX_BIASED} where one is of several tokens, got "
                    f"{len(biases)}"
                )
            dense = torch.zeros(self.vocab_size, dtype=torch.float32)
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
        """Returns ``logit_bias`` for the token behind ``input_ids``."""
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


def _padding(mask: Tensor | None, prompt: Tensor) -> int | Tensor:
    """Returns how many first positions of the prompt are padding, (B,).

    The mask may be longer by the cache's length."""
    if mask is None or mask.dim() != 2:
        return 0
    return ((mask != 0).int().argmax(dim=1) - (mask.shape[1] - prompt.shape[1])).clamp(min=0).to(prompt.device)


def _same_biases(one: Any, other: Any) -> bool:
    """Returns whether two positions have the same biases. Synchronises if they depend on the text."""
    if one is other or one is None or other is None:
        return one is other
    return isinstance(one, tuple) and isinstance(other, tuple) and torch.equal(one[0], other[0])


def _int32(words: Tensor) -> Tensor:
    """Returns words from 0 to 2**32 - 1 as int32 with the same bits."""
    return torch.where(words < 2**31, words, words - 2**32).to(torch.int32)
