"""Decoding with drafts, one sequence at a time, because a cache is cut back to one length for all rows.

The model runs over several drafts at once, and ``LMHeadSampler.verify`` emits its own tokens up to the first that
differs from its draft. Every token is therefore that of plain decoding, for any drafts.

Drafts come from the text (transformers' prompt look-up) or from an assistant. transformers'
``AssistedCandidateGenerator`` would draw with noise of its own, so the assistant is decoded here: with the request's
noise, masks, penalties and filters, so that it agrees with the model as often as possible (docs/speculative.md).
"""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import DynamicCache, GenerationConfig
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator
from transformers.generation.streamers import BaseStreamer
from transformers.utils import ModelOutput

from ...row_params import Reals
from ...sampler import LMHeadSampler
from ...sampling_params import SamplingOptions
from ...token_counts import Counted
from .arguments import CACHE
from .errors import NoTokenError
from .head import HeadInput, HeadTap, get_lm_head
from .processor_params import StepParams

# drafts per round if the assistant's configuration has no number; transformers takes 20 and stops by confidence
ASSISTANT_TOKENS = 5
_CUT_BACK = {"DynamicLayer", "DummyLayer", "DynamicSlidingWindowLayer"}


def require_supported_drafts(
    config: GenerationConfig,
    assistant_model: Any,
    sampler: LMHeadSampler | None,
    batch: int,
    model_kwargs: dict[str, Any],
) -> None:
    """Raises a ValueError that names arguments that drafts do not support."""
    if batch != 1:
        raise ValueError(f"drafts are verified for one sequence at a time, as in transformers, got {batch}")
    if assistant_model is not None and config.prompt_lookup_num_tokens is not None:
        raise ValueError("drafts come from assistant_model or from prompt_lookup_num_tokens, got both")
    if assistant_model is not None and model_kwargs.get("inputs_embeds") is not None:
        raise ValueError("assistant_model reads the prompt's ids: inputs_embeds is not supported with it")
    for name in ("assistant_ensemble_weight", "speculation_type"):
        if getattr(config, name, None) is not None:
            raise ValueError(f"{name} is not supported: drafts change no token here, and need no model made for it")
    if config.return_dict_in_generate:
        for name in ("output_attentions", "output_hidden_states"):
            if getattr(config, name):
                raise ValueError(f"{name} is not supported with drafts: the model runs over several tokens at once")
    if sampler is not None and sampler.tp is not None:
        raise ValueError("sampler must be without tp with drafts")
    _require_cut_back(model_kwargs.get(CACHE) if config.use_cache else None)


def _require_cut_back(cache: Any) -> None:
    """Raises a ValueError that names the cache layers that cannot forget their last tokens."""
    if cache is None:
        raise ValueError("drafts need a key and value cache: use_cache=True, and a model that has one")
    others = {type(layer).__name__ for layer in getattr(cache, "layers", [cache])} - _CUT_BACK
    if others:
        raise ValueError(
            f"drafts need a key and value cache that can be cut back, got {type(cache).__name__} of "
            f"{', '.join(sorted(others))}: static, quantised and recurrent states are not"
        )


class TargetSampler(NamedTuple):
    """The sampler and its arguments for the model's tokens."""

    sampler: LMHeadSampler
    temperature: Reals
    params: StepParams

    def options(self, given: HeadInput, params: SamplingOptions) -> dict[str, Any]:
        """Returns the sampler's arguments for what the LM head was given; ``params``: those of the text."""
        return {"temperature": self.temperature, **params, **given.transform._asdict()}


class CachedModel:
    """A model with its cache over a growing text and changing drafts behind it."""

    def __init__(self, model: Any, tap: HeadTap, model_kwargs: dict[str, Any], length: int) -> None:
        """``model_kwargs`` belong to a text of ``length`` tokens, none of which is in the cache yet."""
        self.model, self.tap = model, tap
        self.kwargs, self.length, self.cached = model_kwargs, length, 0
        self.cache = model_kwargs[CACHE]
        self._outputs: Any = ModelOutput()

    def prefill(self, input_ids: Tensor, config: GenerationConfig) -> HeadInput:
        """Runs the prompt as plain decoding does. Returns the LM head's input at its last position."""
        outputs = self.tap.run(self.model._prefill, input_ids, config, self.kwargs, is_first_iteration=True)
        given = self._finish_run(outputs, input_ids.shape[1], 1)
        # sliding windows record their past from now on, so that ``keep`` can restore it; the prompt, which may run in
        # several chunks, is never cut back
        if hasattr(self.cache, "activate_past_recording"):
            self.cache.activate_past_recording()
        return given

    def run(self, input_ids: Tensor, positions: int) -> HeadInput:
        """Runs over text and drafts. Returns the LM head's input at the last positions."""
        kwargs = self._kwargs_for(input_ids.shape[1])
        new = input_ids.shape[1] - self.cached
        inputs = self.model.prepare_inputs_for_generation(input_ids, next_sequence_length=new, **kwargs)
        if "logits_to_keep" in inputs:
            inputs["logits_to_keep"] = positions
        return self._finish_run(self.tap.run(self.model, **inputs, return_dict=True), input_ids.shape[1], positions)

    def keep(self, length: int) -> None:
        """Sets the text's length and cuts the cache back to all but the last of its tokens."""
        self.kwargs, self.length = self._kwargs_for(length), length
        surplus = max(self.cached - (length - 1), 0)
        for layer in self.cache.layers:  # ``crop`` also drops a recorded past that is before the window
            if (surplus or getattr(layer, "record_past", False)) and getattr(layer, "is_initialized", True):
                layer.crop(-surplus)
        self.cached -= surplus

    def end_drafting(self, length: int) -> None:
        """Sets the text's length and stops recording the past: later users of the cache do not draft."""
        self.keep(length)
        for layer in self.cache.layers:
            if getattr(layer, "record_past", False):
                layer.record_past = False

    def _finish_run(self, outputs: Any, length: int, positions: int) -> HeadInput:
        if outputs.get(CACHE) is not self.cache:
            raise ValueError(f"drafts need a key and value cache, which {type(self.model).__name__} does not return")
        given = self.tap.read(outputs.logits, 1, positions)
        if not self.cached:
            _require_cut_back(self.cache)  # some caches make their layers in the first run
        self.cached, self._outputs = length, outputs
        return given

    def _kwargs_for(self, length: int) -> dict[str, Any]:
        """Returns the model's arguments for a text of ``length`` tokens, updated token by token as in plain
        decoding."""
        kwargs = dict(self.kwargs)
        for _ in range(length - self.length):
            kwargs = self.model._update_model_kwargs_for_generation(self._outputs, kwargs, is_encoder_decoder=False)
        return kwargs


class PromptLookup:
    """Drafts by transformers' prompt look-up: the tokens that followed an earlier occurrence of the last tokens."""

    def __init__(self, config: GenerationConfig) -> None:
        self._candidates = PromptLookupCandidateGenerator(
            eos_token_id=config._eos_token_tensor,
            num_output_tokens=config.prompt_lookup_num_tokens,
            max_matching_ngram_size=config.max_matching_ngram_size or 2,
            max_length=config.max_length,
        )

    def drafts(self, input_ids: Tensor, most: int) -> Tensor:
        """Returns up to ``most`` ids that may follow ``input_ids`` (1, T), as (1, n)."""
        return self._candidates.get_candidates(input_ids)[0][:, input_ids.shape[1] :][:, :most]

    def report(self, drafted: int, accepted: int) -> None:
        """Reports how many of the last drafts were accepted, which changes nothing here."""


class Assistant:
    """Drafts from a smaller model, drawn with the request's own noise and sampling parameters."""

    def __init__(
        self,
        model: Any,
        tap: HeadTap,
        sampler: LMHeadSampler,
        prompt: Tensor,  # (1, T)
        attention_mask: Tensor | None,
        target: TargetSampler,
    ) -> None:
        self._target, self._sampler = target, sampler
        kwargs: dict[str, Any] = {"attention_mask": None, "use_cache": True}
        if attention_mask is not None:
            kwargs["attention_mask"] = attention_mask[:, attention_mask.shape[1] - prompt.shape[1] :]
        position_ids = model._prepare_position_ids_for_generation(prompt, kwargs)
        if "position_ids" in inspect.signature(model.forward).parameters:
            kwargs["position_ids"] = position_ids
        if model._supports_logits_to_keep():
            kwargs["logits_to_keep"] = 1
        # without windows, which a draft may leave before it is cut back: all is kept, and masks select the windows
        kwargs[CACHE] = DynamicCache()
        self._runner = CachedModel(model, tap, kwargs, prompt.shape[1])
        self._runner.run(prompt, 1)  # raises here, before the first token, if the logits are not the head's
        count = model.generation_config.num_assistant_tokens
        self._count = ASSISTANT_TOKENS if count is None else count
        schedule = model.generation_config.num_assistant_tokens_schedule or "constant"
        self._adapts = schedule.startswith("heuristic")

    def drafts(self, input_ids: Tensor, most: int) -> Tensor:
        """Returns up to ``most`` ids that may follow ``input_ids`` (1, T), as (1, n)."""
        sampler, _, params = self._target
        self._sampler.seeds.copy_(sampler.seeds[:1])
        self._sampler.offsets.copy_(sampler.offsets[:1])
        self._runner.keep(input_ids.shape[1])
        text = input_ids
        for _ in range(min(self._count, most)):
            given = self._runner.run(text, 1)
            wanted = params.at(text)
            if isinstance(counted := wanted.get("token_counts"), Counted):
                counts, drafts = counted.counts, text[:, input_ids.shape[1] :].to(counted.counts.device)
                wanted["token_counts"] = counts.scatter_add(1, drafts, torch.ones_like(drafts, dtype=counts.dtype))
            drawn = self._sampler(given.hidden_states[:, 0], **self._target.options(given, wanted)).token_ids
            text = torch.cat([text, drawn.clamp(min=0)[:, None].to(text.device)], dim=1)  # any id in place of -1
        return text[:, input_ids.shape[1] :]

    def report(self, drafted: int, accepted: int) -> None:
        """Reports how many of the last drafts were accepted."""
        if self._adapts and drafted:  # transformers' heuristic
            self._count = self._count + 2 if accepted == drafted else max(1, self._count - 1)


@contextmanager
def make_drafter(
    config: GenerationConfig,
    assistant_model: Any,
    head: nn.Linear,
    prompt: Tensor,  # (1, T)
    model_kwargs: dict[str, Any],
    target: TargetSampler,
) -> Iterator[PromptLookup | Assistant]:
    """Makes the drafter for a model with this head. Raises ValueError for an assistant that cannot draft."""
    if assistant_model is None:
        yield PromptLookup(config)
        return
    try:
        own = get_lm_head(assistant_model)
    except (TypeError, ValueError) as error:
        raise ValueError(f"assistant_model cannot draft: {error}") from error
    name, model_weight, weight = type(assistant_model).__name__, head.weight, own.weight
    if assistant_model._is_stateful:
        raise ValueError(f"assistant_model must have a key and value cache that can be cut back, got a stateful {name}")
    if weight.shape[0] != model_weight.shape[0]:
        raise ValueError(
            f"assistant_model must have the model's {model_weight.shape[0]} tokens, got {name} with {weight.shape[0]}; "
            "one with another tokenizer is not supported"
        )
    if weight.device != model_weight.device:
        raise ValueError(f"assistant_model must be on {model_weight.device}, where the model is, got {weight.device}")
    sampler = LMHeadSampler(own, max_batch_size=1, seed=[0], impl=target.sampler.impl)
    with HeadTap(assistant_model, own) as tap:
        try:
            drafter = Assistant(assistant_model, tap, sampler, prompt, model_kwargs.get("attention_mask"), target)
        except ValueError as error:
            raise ValueError(f"assistant_model cannot draft: {error}") from error
        yield drafter


def decode(
    runner: CachedModel,
    drafter: PromptLookup | Assistant,
    target: TargetSampler,
    input_ids: Tensor,  # (1, T): the prompt
    config: GenerationConfig,
    stopping_criteria: Any,
    streamer: BaseStreamer | None,
) -> Tensor:
    """Decodes with drafts.

    Returns (1, T + new tokens). Criteria and the streamer see tokens one by one, as in plain decoding."""
    sampler, _, params = target
    prompt_length, drafts = input_ids.shape[1], input_ids[:, :0]
    wanted = params.at(input_ids)
    given = runner.prefill(input_ids, config)
    with runner.model._optimize_model_for_decode():
        while True:
            states = given.hidden_states
            verified = sampler.verify(states, drafts.to(states.device), **target.options(given, wanted))
            accepted, *tokens = torch.cat([verified.num_accepted, verified.token_ids[0]]).tolist()  # synchronises
            drafter.report(drafts.shape[1], accepted)
            continues = False
            try:
                for place, token in enumerate(tokens[: accepted + 1]):
                    if token < 0 and drafts.shape[1]:  # a NaN of a draft reaches the states before it: retry without
                        break
                    if token < 0:
                        raise NoTokenError([0], input_ids.shape[1] + 1 - prompt_length)
                    drawn = verified.token_ids[:, place].to(input_ids.device)
                    params.count(drawn, input_ids.shape[1])
                    input_ids = torch.cat([input_ids, drawn[:, None]], dim=-1)
                    ended = bool(stopping_criteria(input_ids, None).all())
                    if streamer is not None:
                        streamer.put(drawn.cpu())
                    if ended:
                        return input_ids
                continues = True
            finally:
                if not continues:  # the end, or an error of a streamer or criterion: undo tokens behind it
                    runner.end_drafting(input_ids.shape[1])
                    sampler.offsets[:1] -= verified.num_emitted - (place + 1)
            runner.keep(input_ids.shape[1])
            most = config.max_length - input_ids.shape[1] - 1  # a run draws one token more than it has drafts
            drafts = drafter.drafts(input_ids, most) if most > 0 and token >= 0 else input_ids[:, :0]
            wanted, fit = params.over(input_ids, drafts)
            drafts = drafts[:, :fit]
            given = runner.run(torch.cat([input_ids, drafts], dim=1), drafts.shape[1] + 1)
