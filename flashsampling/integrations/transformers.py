"""Hugging Face transformers: ``model.generate(..., custom_generate=generate)`` with the LM head fused into the sampler.

    from flashsampling.integrations.transformers import generate

    model.generate(**inputs, custom_generate=generate, do_sample=True, temperature=0.8, top_k=0, seeds=[1, 2, 3])

The decoding loop is transformers' own ``custom_generate`` contract: KV cache, padding and stopping criteria come from there.
While it runs, the model's output embedding is replaced by one that hands the hidden states through, so that what the model
calls logits has D columns instead of V.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation.logits_process import TemperatureLogitsWarper
from transformers.generation.streamers import BaseStreamer

from ..module import LMHeadSampler

_checked_models: "WeakKeyDictionary[nn.Module, bool]" = WeakKeyDictionary()


class _HandThrough(nn.Module):
    def forward(self, hidden_states: Tensor) -> Tensor:
        return hidden_states


@contextmanager
def _hidden_states_for_logits(model: Any) -> Iterator[None]:
    lm_head = model.get_output_embeddings()
    model.set_output_embeddings(_HandThrough())
    try:
        yield
    finally:
        model.set_output_embeddings(lm_head)


def _require_plain_head(model: Any, input_ids: Tensor) -> None:
    """Raises ValueError unless the model's logits are its LM head's output: no soft-capping, no scale, no bias.

    Looks once per model, at the logits of one token: a list of configuration names would miss the next model family.
    """
    if model in _checked_models:
        return
    lm_head = model.get_output_embeddings()
    if not isinstance(lm_head, nn.Linear):
        raise ValueError(f"the model's output embedding must be an nn.Linear, got {type(lm_head).__name__}")
    if model.config.is_encoder_decoder:
        raise ValueError("encoder-decoder models are not supported")
    seen: list[Tensor] = []
    hook = lm_head.register_forward_hook(lambda module, args, output: seen.append(output.detach().clone()))
    try:
        logits = model(input_ids=input_ids[:1, -1:], use_cache=False).logits
    finally:
        hook.remove()
    if len(seen) != 1 or seen[0].shape != logits.shape or not torch.equal(seen[0].float(), logits.float()):
        raise ValueError(f"{type(model).__name__} changes the logits after its LM head, which the fused step cannot follow")
    _checked_models[model] = True


def _temperature(generation_config: GenerationConfig, processors: LogitsProcessorList) -> float:
    """The batch's temperature; ValueError for any other logits processor, none of which may be dropped silently."""
    others = [type(processor).__name__ for processor in processors if not isinstance(processor, TemperatureLogitsWarper)]
    if others:
        raise ValueError(
            f"the fused step samples with a temperature only; switch off {', '.join(others)} "
            "(for transformers' defaults: top_k=0, top_p=1.0)"
        )
    if not generation_config.do_sample:
        return 0.0
    return 1.0 if generation_config.temperature is None else float(generation_config.temperature)


@torch.no_grad()
def generate(
    model: Any,
    input_ids: Tensor,  # (B, T), left-padded
    logits_processor: LogitsProcessorList | None = None,
    stopping_criteria: StoppingCriteriaList | None = None,
    generation_config: GenerationConfig | None = None,
    *,
    sampler: LMHeadSampler | None = None,
    seeds: Sequence[int] | Tensor | None = None,
    temperatures: Sequence[float] | Tensor | None = None,
    token_streamer: BaseStreamer | None = None,
    **model_kwargs: Any,
) -> Tensor:
    """Decoding loop for ``model.generate(..., custom_generate=generate)``.

    Args:
        model, input_ids, logits_processor, stopping_criteria, generation_config, model_kwargs: from transformers.
        sampler: an ``LMHeadSampler`` of this model's head, to keep its state (or to name an ``impl``); None makes one.
        seeds: one per sequence; each sequence's tokens then depend on its own seed, prompt and temperature alone. None
            leaves the sampler's seeds, or draws fresh ones from torch's default generator.
        temperatures: one per sequence, 0 for greedy; None uses ``generation_config`` for all.
        token_streamer: gets every step's (B,) token ids. It has a name of its own because transformers (5.23) does not hand
            ``streamer`` on to a ``custom_generate`` callable.

    Returns:
        (B, T + new tokens) int64 token ids, sequences that ended early padded with the pad token.

    Raises:
        ValueError: the generation asks for something that the fused step does not do: logits processors other than the
            temperature, a model that changes its logits after the LM head, scores or logits in the output.
    """
    if generation_config is None or stopping_criteria is None or logits_processor is None:
        raise ValueError("generate is called by model.generate(..., custom_generate=generate), not by itself")
    if generation_config.return_dict_in_generate:
        raise ValueError("return_dict_in_generate is not supported: there are no scores or logits to return")
    _require_plain_head(model, input_ids)
    batch, device = input_ids.shape[0], input_ids.device
    temperature: float | Tensor = _temperature(generation_config, logits_processor)
    if temperatures is not None:
        temperature = torch.as_tensor(temperatures, dtype=torch.float32, device=device)
    if sampler is None:
        sampler = LMHeadSampler(model.get_output_embeddings(), max_batch_size=batch)
    if seeds is not None:
        sampler.reset(torch.as_tensor(seeds, dtype=torch.int64), rows=slice(0, batch))

    pad_token = generation_config._pad_token_tensor
    ends = any(hasattr(criterion, "eos_token_id") for criterion in stopping_criteria)
    unfinished = torch.ones(batch, dtype=torch.bool, device=device)
    with _hidden_states_for_logits(model):
        outputs = model._prefill(input_ids, generation_config, model_kwargs, is_first_iteration=True)
        while True:
            model_kwargs = model._update_model_kwargs_for_generation(outputs, model_kwargs, is_encoder_decoder=False)
            next_tokens = sampler(outputs.logits[:, -1], temperature=temperature).token_ids
            del outputs
            if ends:
                next_tokens = torch.where(unfinished, next_tokens, pad_token)
            input_ids = torch.cat([input_ids, next_tokens[:, None]], dim=-1)
            if token_streamer is not None:
                token_streamer.put(next_tokens.cpu())
            unfinished &= ~stopping_criteria(input_ids, None)
            if not unfinished.any():
                break
            inputs = model.prepare_inputs_for_generation(
                input_ids, next_sequence_length=1 if model_kwargs["use_cache"] else None, **model_kwargs
            )
            outputs = model(**inputs, return_dict=True)
    if token_streamer is not None:
        token_streamer.end()
    return input_ids
