"""The decoding loop."""

import inspect
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation import GenerationMixin
from transformers.generation.streamers import BaseStreamer

from ...module import LMHeadSampler
from .arguments import (
    arguments_of_model_generate,
    batch_temperature,
    require_sampler_of,
    require_what_we_do,
    row_seeds,
    row_temperatures,
)
from .head import HeadTap, checked_lm_head

if "is_first_iteration" not in inspect.signature(GenerationMixin._prefill).parameters:
    raise ImportError(
        f"flashsampling.integrations.transformers needs transformers 5.3 or newer, got {transformers.__version__}"
    )


class NoTokenError(RuntimeError):
    """A sequence has no next token: its scores hold a NaN or no finite value. Raised before the step's ids are used.

    Attributes:
        rows: the sequences' places in the batch.
    """

    def __init__(self, rows: list[int], position: int) -> None:
        super().__init__(
            f"no token for rows {rows} of the batch at new token {position}: a NaN in their logits, or none finite"
        )
        self.rows = rows


@torch.no_grad()
def generate(
    model: Any,
    input_ids: Tensor,  # (B, T), left-padded
    logits_processor: LogitsProcessorList | None = None,
    stopping_criteria: StoppingCriteriaList | None = None,
    generation_config: GenerationConfig | None = None,
    synced_gpus: bool | None = None,
    streamer: BaseStreamer | None = None,
    *,
    sampler: LMHeadSampler | None = None,
    seeds: int | Sequence[int] | Tensor | None = None,
    temperatures: Sequence[float] | Tensor | None = None,
    token_streamer: BaseStreamer | None = None,
    **model_kwargs: Any,
) -> Tensor:
    """Decoding loop for ``model.generate(..., custom_generate=generate)``. docs/transformers.md has every argument and model.

    Several threads may generate with one model, each with a sampler of its own, beside plain calls of it.

    Args:
        model, input_ids, logits_processor, stopping_criteria, generation_config, synced_gpus, streamer, model_kwargs: from
            transformers. The streamer gets the prompt and every step's (B,) ids, and its end also when this raises.
        sampler: an ``LMHeadSampler.from_model(model)``, to keep its state (or to name an ``impl``); None makes one.
        seeds: one per returned sequence; each sequence's tokens then depend on its own seed, prompt and temperature alone. An
            int gives each a seed of its own. None leaves the sampler's seeds, or draws fresh ones from torch's default
            generator.
        temperatures: one per returned sequence, 0 for greedy; None uses ``generation_config`` for all.
        token_streamer: a second streamer, alike: it too gets the prompt first.

    Returns:
        (B, T + new tokens) int64 token ids, sequences that ended early padded with the pad token.

    Raises:
        ValueError: the generation asks for something that the fused step does not do: logits processors other than the
            temperature, beams, drafts, scores or logits in the output; a model that changes its logits after the LM head
            (``checked_lm_head``); seeds, temperatures or a sampler that do not fit. Before the first token.
        NoTokenError: a sequence's logits hold a NaN, or no finite value.
        flashsampling.distributed.TensorParallelError: as in ``flashsampling.sample``.

    Example:
        >>> import torch, transformers
        >>> from flashsampling.integrations.transformers import generate
        >>> config = transformers.GPT2Config(vocab_size=1000, n_embd=8, n_layer=1, n_head=1, bos_token_id=0, eos_token_id=None)
        >>> model = transformers.GPT2LMHeadModel(config)  # its weights are random
        >>> prompts = torch.tensor([[5, 6], [7, 8]])
        >>> options = {"do_sample": True, "top_k": 0, "max_new_tokens": 4, "seeds": [1, 2]}
        >>> model.generate(prompts, custom_generate=generate, **options).shape
        torch.Size([2, 6])
    """
    given = arguments_of_model_generate(model)
    streamer = given.get("streamer") if streamer is None else streamer
    synced_gpus = given.get("synced_gpus") if synced_gpus is None else synced_gpus
    streamers = [one for one in (streamer, token_streamer) if one is not None]
    try:
        if generation_config is None or stopping_criteria is None or logits_processor is None:
            raise ValueError("generate is called by model.generate(..., custom_generate=generate), not by itself")
        require_what_we_do(generation_config, given.get("assistant_model"), bool(synced_gpus))
        batch, device = input_ids.shape[0], input_ids.device
        temperature: float | Tensor = batch_temperature(generation_config, logits_processor)
        head = checked_lm_head(model)
        if temperatures is not None:
            temperature = row_temperatures(temperatures, generation_config, batch, head.weight.device)
        if seeds is not None:
            seeds = row_seeds(seeds, generation_config, batch)
        if sampler is None:
            sampler = LMHeadSampler.from_model(model, max_batch_size=max(batch, 1))
        else:
            require_sampler_of(head, sampler, batch)
        if seeds is not None:
            sampler.reset(seeds, rows=slice(0, batch))
        pad_token = generation_config._pad_token_tensor
        ends = any(hasattr(criterion, "eos_token_id") for criterion in stopping_criteria)
        if ends and pad_token is None:
            raise ValueError("pad_token_id must be given where sequences end at different lengths, got None")
        if ends:
            pad_token = pad_token.to(device)
        generation_config.disable_compile = True  # transformers' copy; a graph compiled earlier knows nothing of our hooks

        if token_streamer is not None:  # streamer has had it from transformers
            token_streamer.put(input_ids.cpu())
        prompt_length = input_ids.shape[1]
        unfinished = torch.ones(batch, dtype=torch.bool, device=device)
        with HeadTap(model, head) as tap, ExitStack() as decoding:
            outputs = tap.run(model._prefill, input_ids, generation_config, model_kwargs, is_first_iteration=True)
            decoding.enter_context(model._optimize_model_for_decode())
            while True:
                hidden_states = tap.last_hidden_states(outputs.logits, batch)
                model_kwargs = model._update_model_kwargs_for_generation(outputs, model_kwargs, is_encoder_decoder=False)
                del outputs
                next_tokens = sampler(hidden_states, temperature=temperature).token_ids.to(device)
                lost = next_tokens < 0
                if ends:
                    lost &= unfinished
                    next_tokens = torch.where(unfinished, next_tokens, pad_token)
                next_tokens = next_tokens.clamp(min=0)  # -1 is no id: criteria look ids up, and the step fails below
                input_ids = torch.cat([input_ids, next_tokens[:, None]], dim=-1)
                unfinished &= ~stopping_criteria(input_ids, None)
                going_on, failed = torch.stack([unfinished.any(), lost.any()]).tolist()  # the step's one synchronisation
                if failed:
                    if sampler.tp is not None:
                        sampler.tp.check()
                    raise NoTokenError(lost.nonzero()[:, 0].tolist(), input_ids.shape[1] - prompt_length)
                for one in streamers:
                    one.put(next_tokens.cpu())
                if not going_on:
                    return input_ids
                inputs = model.prepare_inputs_for_generation(
                    input_ids, next_sequence_length=1 if model_kwargs["use_cache"] else None, **model_kwargs
                )
                outputs = tap.run(model, **inputs, return_dict=True)
    finally:
        for one in streamers:  # after an error, too: whoever reads from them would wait for ever
            one.end()
