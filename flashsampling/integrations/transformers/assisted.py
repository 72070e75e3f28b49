"""Decoding with drafts: the model runs over several at once, and ``LMHeadSampler.verify`` emits what it draws up to the first
that is another, so every token is that of plain decoding, whatever drafted it.

Drafts come from the text (transformers' own prompt look-up) or from an assistant. That one decodes here and not by
transformers' ``AssistedCandidateGenerator``, which draws with noise of its own: ours draws with the request's, under the
request's masks, penalties and filters, so that it agrees with the model as often as it can (docs/speculative.md).

One sequence at a time: a cache is cut back to one length for all rows.
"""

import functools
import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from transformers import DynamicCache, GenerationConfig
from transformers.cache_utils import DynamicSlidingWindowLayer
from transformers.generation import GenerationMode
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator
from transformers.generation.streamers import BaseStreamer
from transformers.utils import ModelOutput

from ...sampler import LMHeadSampler
from ...token_counts import Counted
from .arguments import CACHE
from .errors import NoTokenError
from .head import HeadTap, lm_head_of
from .processor_params import Requests

ASSISTANT_TOKENS = (
    5  # drafts a round where the assistant's configuration does not say; transformers ends its 20 by confidence
)
_CUT_BACK = {"DynamicLayer", "DummyLayer"}
_CUT_BACK_WITH_ITS_PAST = {"DynamicSlidingWindowLayer"}  # from the release of transformers on that can record it


def is_drafted(config: GenerationConfig, assistant_model: Any) -> bool:
    """Whether this asks for drafts."""
    return config.get_generation_mode(assistant_model) == GenerationMode.ASSISTED_GENERATION


def require_drafts_we_do(
    config: GenerationConfig,
    assistant_model: Any,
    sampler: LMHeadSampler | None,
    batch: int,
    model_kwargs: dict[str, Any],
) -> None:
    """Raises ValueError, by name, for what does not go with drafts."""
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
    _require_cut_back("drafts", model_kwargs.get(CACHE) if config.use_cache else None)


def _require_cut_back(what: str, cache: Any) -> None:
    """ValueError that names the layers of a key and value cache that cannot forget its last tokens."""
    if cache is None:
        raise ValueError(f"{what} need a key and value cache: use_cache=True, and a model that has one")
    if getattr(cache, "offloading", False):
        raise ValueError(f"{what} need a key and value cache that is cut back where it lies, got an offloaded one")
    others = {
        type(layer).__name__
        for layer in getattr(cache, "layers", [cache])
        if type(layer).__name__ not in _CUT_BACK
        and not (type(layer).__name__ in _CUT_BACK_WITH_ITS_PAST and hasattr(layer, "activate_past_recording"))
    }
    if others:
        raise ValueError(
            f"{what} need a key and value cache that can be cut back, got {type(cache).__name__} of "
            f"{', '.join(sorted(others))}: static, quantised and recurrent states are not"
        )


class Drawing(NamedTuple):
    """How the model's tokens are drawn."""

    sampler: LMHeadSampler
    temperature: float | Tensor
    requests: Requests


class Runner:
    """A model and its cache, over a text that grows, and drafts behind it that come and go."""

    def __init__(self, model: Any, tap: HeadTap, model_kwargs: dict[str, Any], length: int, what: str) -> None:
        """``model_kwargs`` are those of a text of so many tokens, with a cache that holds none of these yet; ``what`` drafts,
        or is helped, in errors."""
        self.model, self.tap, self.what = model, tap, what
        self.kwargs, self.length, self.cached = model_kwargs, length, 0
        self.cache = model_kwargs[CACHE]
        self._outputs: Any = ModelOutput()

    def prefill(self, input_ids: Tensor, config: GenerationConfig) -> Tensor:
        """(1, 1, D): behind the prompt, run as in plain decoding. Drafts may follow."""
        outputs = self.tap.run(self.model._prefill, input_ids, config, self.kwargs, is_first_iteration=True)
        states = self._ran(outputs, input_ids.shape[1], 1)
        self.record()
        return states

    def record(self) -> None:
        """From now on the cache's windows remember what was before them until ``keep``, which may bring it back: see
        ``_windows_run_again``. A prompt in chunks is several runs, and nothing of it is cut back."""
        if hasattr(self.cache, "activate_past_recording"):
            self.cache.activate_past_recording()

    def states(self, input_ids: Tensor, positions: int) -> Tensor:
        """(1, positions, D): behind the last tokens of these, which are the text and drafts."""
        kwargs = self._longer(input_ids.shape[1])
        new = input_ids.shape[1] - self.cached
        inputs = self.model.prepare_inputs_for_generation(input_ids, next_sequence_length=new, **kwargs)
        if "logits_to_keep" in inputs:
            inputs["logits_to_keep"] = positions
        return self._ran(self.tap.run(self.model, **inputs, return_dict=True), input_ids.shape[1], positions)

    def keep(self, length: int) -> None:
        """The text has so many tokens now. The cache forgets what is behind all but the last of them."""
        self.kwargs, self.length = self._longer(length), length
        surplus = max(self.cached - (length - 1), 0)
        for layer in self.cache.layers:  # one that records its past then forgets what is before its window, too
            if (surplus or getattr(layer, "record_past", False)) and getattr(layer, "is_initialized", True):
                layer.crop(-surplus)
        self.cached -= surplus

    def give_back(self, length: int) -> None:
        """Of a text of so many tokens: whoever goes on with the cache drafts nothing, and its windows need not remember."""
        self.keep(length)
        for layer in self.cache.layers:
            if getattr(layer, "record_past", False):
                layer.record_past = False

    def _ran(self, outputs: Any, length: int, positions: int) -> Tensor:
        if outputs.get(CACHE) is not self.cache:
            raise ValueError(
                f"{self.what} need a key and value cache, which {type(self.model).__name__} does not return"
            )
        states = self.tap.last_hidden_states(outputs.logits, 1, positions)
        if not self.cached:
            _require_cut_back(self.what, self.cache)  # some caches make their layers now
        self.cached, self._outputs = length, outputs
        return states

    def _longer(self, length: int) -> dict[str, Any]:
        """The model's arguments for a text of so many tokens: token by token, as plain decoding makes them."""
        kwargs = dict(self.kwargs)
        for _ in range(length - self.length):
            kwargs = self.model._update_model_kwargs_for_generation(self._outputs, kwargs, is_encoder_decoder=False)
        return kwargs


class Drafter(Protocol):
    """Whoever proposes tokens."""

    def drafts(self, input_ids: Tensor, most: int) -> Tensor:
        """(1, n): up to ``most`` ids that may follow these, (1, T)."""

    def told(self, drafted: int, accepted: int) -> None:
        """How many of the last ones held."""


class PromptLookup:
    """Drafts of transformers' own: what followed the last tokens where they came before."""

    def __init__(self, config: GenerationConfig) -> None:
        self._candidates = PromptLookupCandidateGenerator(
            eos_token_id=config._eos_token_tensor,
            num_output_tokens=config.prompt_lookup_num_tokens,
            max_matching_ngram_size=config.max_matching_ngram_size or 2,
            max_length=config.max_length,
        )

    def drafts(self, input_ids: Tensor, most: int) -> Tensor:
        """See ``Drafter``."""
        return self._candidates.get_candidates(input_ids)[0][:, input_ids.shape[1] :][:, :most]

    def told(self, drafted: int, accepted: int) -> None:
        """See ``Drafter``."""


class Assistant:
    """Drafts of a smaller model, drawn as the model draws: with the request's own noise and all that the request asks for."""

    def __init__(
        self,
        model: Any,
        tap: HeadTap,
        sampler: LMHeadSampler,
        prompt: Tensor,  # (1, T)
        attention_mask: Tensor | None,
        target: Drawing,
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
        mode = GenerationMode.ASSISTED_GENERATION  # in older releases of transformers a cache without windows, then
        model._prepare_cache_for_generation(GenerationConfig(use_cache=True), kwargs, mode, 1, prompt.shape[1])
        layers = getattr(kwargs.get(CACHE), "layers", ())
        if any(type(layer) is DynamicSlidingWindowLayer for layer in layers) and not _windows_run_again():
            kwargs[CACHE] = DynamicCache()  # masks cut windows out of it
        _require_cut_back("drafts of assistant_model", kwargs.get(CACHE))
        self._runner = Runner(model, tap, kwargs, prompt.shape[1], "drafts of assistant_model")
        self._runner.record()
        self._runner.states(
            prompt, 1
        )  # before the first token, since it is refused where its logits are not its head's
        count = model.generation_config.num_assistant_tokens
        self._count = ASSISTANT_TOKENS if count is None else count
        schedule = model.generation_config.num_assistant_tokens_schedule or "constant"
        self._adapts = schedule.startswith("heuristic")

    def drafts(self, input_ids: Tensor, most: int) -> Tensor:
        """See ``Drafter``."""
        sampler, temperature, requests = self._target
        self._sampler.seeds.copy_(sampler.seeds[:1])
        self._sampler.offsets.copy_(sampler.offsets[:1])
        self._runner.keep(input_ids.shape[1])
        text = input_ids
        for _ in range(min(self._count, most)):
            states = self._runner.states(text, 1)[:, 0]
            wanted = requests.at(text)
            if isinstance(counted := wanted.get("token_counts"), Counted):
                wanted["token_counts"] = _counted(counted.counts, text[:, input_ids.shape[1] :])
            drawn = self._sampler(states, temperature=temperature, **wanted).token_ids
            text = torch.cat([text, drawn.clamp(min=0)[:, None].to(text.device)], dim=1)  # -1: no token, so any will do
        return text[:, input_ids.shape[1] :]

    def told(self, drafted: int, accepted: int) -> None:
        """See ``Drafter``."""
        if self._adapts and drafted:  # as transformers does
            self._count = self._count + 2 if accepted == drafted else max(1, self._count - 1)


@functools.cache
def _windows_run_again() -> bool:
    """Whether a cache's windows that remember what was before them may be run over twice before they are cut back, as by an
    assistant. Transformers 5.15 to 5.17 then give the model more keys than they have told the mask."""
    layer, states = DynamicSlidingWindowLayer(2), torch.zeros(1, 1, 3, 1)
    if not hasattr(layer, "activate_past_recording"):
        return False
    layer.activate_past_recording()
    layer.update(states, states)
    told, _offset = layer.get_mask_sizes(1)
    keys, _values = layer.update(states[:, :, :1], states[:, :, :1])
    return bool(keys.shape[2] == told)


@contextmanager
def drafter_of(
    config: GenerationConfig,
    assistant_model: Any,
    head: nn.Linear,
    prompt: Tensor,  # (1, T)
    model_kwargs: dict[str, Any],
    target: Drawing,
) -> Iterator[Drafter]:
    """Whoever drafts for a model with such a head. ValueError for an assistant that cannot."""
    if assistant_model is None:
        yield PromptLookup(config)
        return
    try:
        own = lm_head_of(assistant_model)
    except (TypeError, ValueError) as error:
        raise ValueError(f"assistant_model cannot draft: {error}") from error
    name, theirs, weight = type(assistant_model).__name__, head.weight, own.weight
    if assistant_model._is_stateful:
        raise ValueError(f"assistant_model must have a key and value cache that can be cut back, got a stateful {name}")
    if weight.shape[0] != theirs.shape[0]:
        raise ValueError(
            f"assistant_model must have the model's {theirs.shape[0]} tokens, got {name} with {weight.shape[0]}; one with "
            "another tokenizer is not supported"
        )
    if weight.device != theirs.device:
        raise ValueError(f"assistant_model must be on {theirs.device}, where the model is, got {weight.device}")
    sampler = LMHeadSampler(own, max_batch_size=1, seed=[0], impl=target.sampler.impl)
    with HeadTap(assistant_model, own, learned=sampler._set_transform) as tap:
        try:
            drafter = Assistant(assistant_model, tap, sampler, prompt, model_kwargs.get("attention_mask"), target)
        except ValueError as error:
            raise ValueError(f"assistant_model cannot draft: {error}") from error
        yield drafter


def decode(
    runner: Runner,
    drafter: Drafter,
    target: Drawing,
    input_ids: Tensor,  # (1, T): the prompt
    config: GenerationConfig,
    stopping_criteria: Any,
    streamers: Sequence[BaseStreamer],
) -> Tensor:
    """(1, T + new tokens). Criteria and streamers see one token after the other, as in plain decoding."""
    sampler, temperature, requests = target
    prompt_length, drafts = input_ids.shape[1], input_ids[:, :0]
    wanted = requests.at(input_ids)
    states = runner.prefill(input_ids, config)
    with runner.model._optimize_model_for_decode():
        while True:
            verified = sampler.verify(states, drafts.to(states.device), temperature=temperature, **wanted)
            accepted, *tokens = torch.cat(
                [verified.num_accepted, verified.token_ids[0]]
            ).tolist()  # waits for the device
            drafter.told(drafts.shape[1], accepted)
            goes_on = False
            try:
                for place, token in enumerate(tokens[: accepted + 1]):
                    if (
                        token < 0 and drafts.shape[1]
                    ):  # a draft's NaN is in the states before it, too: once more without
                        break
                    if token < 0:
                        raise NoTokenError([0], input_ids.shape[1] + 1 - prompt_length)
                    drawn = verified.token_ids[:, place].to(input_ids.device)
                    requests.drawn(drawn, input_ids.shape[1])
                    input_ids = torch.cat([input_ids, drawn[:, None]], dim=-1)
                    ended = bool(stopping_criteria(input_ids, None).all())
                    for one in streamers:
                        one.put(drawn.cpu())
                    if ended:
                        return input_ids
                goes_on = True
            finally:
                if (
                    not goes_on
                ):  # the end, or an error of a streamer's or a criterion's: what is behind it nobody was given
                    runner.give_back(input_ids.shape[1])
                    sampler.offsets[:1] -= verified.num_emitted - (place + 1)
            runner.keep(input_ids.shape[1])
            most = config.max_length - input_ids.shape[1] - 1  # one more than drafts is drawn
            drafts = drafter.drafts(input_ids, most) if most > 0 and token >= 0 else input_ids[:, :0]
            wanted, fit = requests.over(input_ids, drafts)
            drafts = drafts[:, :fit]
            states = runner.states(torch.cat([input_ids, drafts], dim=1), drafts.shape[1] + 1)


def _counted(counts: Tensor, drafts: Tensor) -> Tensor:
    """Counts (1, V) with drafts (1, n) on top."""
    ones = torch.ones_like(drafts, dtype=counts.dtype, device=counts.device)
    drafted: Tensor = counts.scatter_add(1, drafts.to(counts.device), ones)
    return drafted
