"""The decoding loop."""

import functools
import inspect
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation import GenerateDecoderOnlyOutput, GenerationMixin
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import ALL_CACHE_NAMES

from ...outputs import SampleOutput
from ...sampler import LMHeadSampler
from ...sampling_params import SamplingOptions
from .arguments import (
    CACHE,
    SWITCH_OFF,
    arguments_of_model_generate,
    drop_adapter_hooks,
    require_no_seeds,
    require_sampler_of,
    require_transform_of,
    require_transformers_loop,
    require_what_we_do,
    row_seeds,
    row_temperatures,
)
from .assisted import Drawing, Runner, decode, drafter_of, is_drafted, require_drafts_we_do
from .errors import NoTokenError
from .head import HeadTap, lm_head_of
from .processor_params import Requests
from .processors import taken

if "is_first_iteration" not in inspect.signature(GenerationMixin._prefill).parameters:
    raise ImportError(
        f"flashsampling.integrations.transformers needs transformers 5.3 or newer, got {transformers.__version__}"
    )


@dataclass
class GenerateOutput(GenerateDecoderOnlyOutput):
    """What ``generate`` returns with ``return_dict_in_generate=True``: transformers' own fields, of which ``scores`` and
    ``logits`` are None, and more.

    Attributes:
        logprobs: (B, new tokens) float32, with ``return_logprobs=True``: log softmax of the model's logits at the drawn token.
            NaN behind the end of a sequence.
        processed_logprobs: likewise, of the distribution that it was drawn from, after everything that the configuration asks
            for. With ``do_sample=False`` that is the one at temperature 1, of all tokens that are not masked.
        ranks: (B, new tokens) int64, likewise: 1 + how many tokens have a larger logit of the model; -1 behind the end.
        top_token_ids: (B, new tokens, n) int64, with ``top_logprobs=n``: the tokens with the model's highest logits.
        top_logprobs: (B, new tokens, n) float32: theirs.
    """

    logprobs: Tensor | None = None
    processed_logprobs: Tensor | None = None
    ranks: Tensor | None = None
    top_token_ids: Tensor | None = None
    top_logprobs: Tensor | None = None


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
    seed: int | Sequence[int] | Tensor | None = None,
    temperatures: Sequence[float] | Tensor | None = None,
    token_streamer: BaseStreamer | None = None,
    return_logprobs: bool = False,
    top_logprobs: int = 0,
    request: SamplingOptions | None = None,
    seeds: None = None,
    **model_kwargs: Any,
) -> Tensor | GenerateOutput:
    """Decoding loop for ``model.generate(..., custom_generate=generate)``. docs/transformers.md has every argument and model.

    Several threads may generate with one model, each with a sampler of its own, beside plain calls of it.

    With ``assistant_model`` or ``prompt_lookup_num_tokens``, given to ``model.generate``, the model runs over several drafts at
    once. Tokens are those without drafts, as far as the model's hidden states are, for one sequence.

    Args:
        model, input_ids, logits_processor, stopping_criteria, generation_config, synced_gpus, streamer, model_kwargs: from
            transformers. The streamer gets the prompt and every step's (B,) ids, and its end also when this raises.
        sampler: an ``LMHeadSampler.from_model(model)``, to keep its state (or to name an ``impl``); None makes one.
        seed: one per returned sequence; each sequence's tokens then depend on its own seed, prompt and temperature alone. An
            int gives each a seed of its own. None leaves the sampler's seeds, or draws fresh ones from torch's default
            generator.
        temperatures: one per returned sequence, 0 for greedy; None uses ``generation_config`` for all, whose ``temperature`` is
            one number.
        token_streamer: a second streamer, alike: it too gets the prompt first.
        return_logprobs: fills ``logprobs``, ``processed_logprobs`` and ``ranks`` of a ``GenerateOutput``.
        top_logprobs: up to 20; fills ``top_token_ids`` and ``top_logprobs``.
        request: what a ``GenerationConfig`` has no field for, or one for all rows alone, as ``flashsampling.sample`` takes it:
            ``logit_bias``, ``token_mask``, ``top_k``, ``top_p``, ``min_p``, ``repetition_penalty``, ``frequency_penalty`` and
            ``presence_penalty``, for all rows or one per returned sequence. Each takes the place of its field (None too, but
            of ``sequence_bias``); a mask is added.

    Returns:
        (B, T + new tokens) int64 token ids, sequences that ended early padded with the pad token; or a ``GenerateOutput``, with
        ``return_dict_in_generate=True``.

    Raises:
        ValueError: the generation asks for something that the fused step does not do: logits processors that it has no
            argument for, or in another order, beams, scores or logits in the output, drafts for several sequences or with a
            cache that cannot be cut back; a model that makes something else of its logits than a scale and a soft cap
            (``checked_lm_head``); a seed, temperatures or a sampler that do not fit. Before the first token.
        NoTokenError: a sequence's logits hold a NaN, or no finite value, or no token is allowed.
        flashsampling.tensor_parallel.TensorParallelError: as in ``flashsampling.sample``.

    Example:
        >>> import torch, transformers
        >>> from flashsampling.integrations.transformers import generate
        >>> config = transformers.GPT2Config(vocab_size=1000, n_embd=8, n_layer=1, n_head=1, bos_token_id=0, eos_token_id=None)
        >>> model = transformers.GPT2LMHeadModel(config)  # its weights are random
        >>> prompts = torch.tensor([[5, 6], [7, 8]])
        >>> options = {"do_sample": True, "top_p": 0.9, "max_new_tokens": 4, "seed": [1, 2]}
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
        require_no_seeds(seeds)
        logprobs: SamplingOptions = {"return_logprobs": return_logprobs, "top_logprobs": top_logprobs}
        require_transformers_loop(model)
        assistant = given.get("assistant_model")
        require_what_we_do(generation_config, assistant, bool(synced_gpus), logprobs)
        batch, device = input_ids.shape[0], input_ids.device
        drafted = is_drafted(generation_config, assistant)
        if drafted:
            require_drafts_we_do(generation_config, assistant, sampler, batch, model_kwargs)
        params = taken(logits_processor, bool(generation_config.do_sample), SWITCH_OFF)
        temperature: float | Tensor = params.temperature
        head = lm_head_of(model)
        weight = head.weight
        given_mask = model_kwargs.get("attention_mask")
        requests = Requests(
            params, input_ids, weight.shape[0], weight.device, {} if request is None else request, given_mask
        )
        if temperatures is not None:
            temperature = row_temperatures(temperatures, generation_config, batch, weight.device)
        if seed is not None:
            seed = row_seeds(seed, generation_config, batch)
        if sampler is None:
            sampler = LMHeadSampler(head, max_batch_size=max(batch, 1))
            learned = sampler._set_transform
        else:
            require_sampler_of(head, sampler, batch)
            learned = functools.partial(require_transform_of, sampler)
        if seed is not None:
            sampler.reset(seed, rows=slice(0, batch))
        pad_token = generation_config._pad_token_tensor
        ends = any(hasattr(criterion, "eos_token_id") for criterion in stopping_criteria)
        if ends and pad_token is None:
            raise ValueError("pad_token_id must be given where sequences end at different lengths, got None")
        if ends:
            pad_token = pad_token.to(device)
        pads_below_0 = ends and bool((pad_token < 0).any())
        generation_config.disable_compile = (
            True  # transformers' copy; a graph compiled earlier knows nothing of our hooks
        )

        if token_streamer is not None:  # streamer has had it from transformers
            token_streamer.put(input_ids.cpu())
        prompt_length = input_ids.shape[1]
        unfinished = torch.ones(batch, dtype=torch.bool, device=device)
        kept = _Kept(generation_config)
        with HeadTap(model, head, learned=learned) as tap, ExitStack() as decoding:
            if drafted:
                drawing = Drawing(sampler, temperature, requests)
                drafter = decoding.enter_context(
                    drafter_of(generation_config, assistant, head, input_ids, model_kwargs, drawing)
                )
                runner = Runner(model, tap, model_kwargs, prompt_length, "drafts")
                input_ids = decode(runner, drafter, drawing, input_ids, generation_config, stopping_criteria, streamers)
                return kept.output(input_ids, model_kwargs) if generation_config.return_dict_in_generate else input_ids
            outputs = tap.run(model._prefill, input_ids, generation_config, model_kwargs, is_first_iteration=True)
            decoding.enter_context(model._optimize_model_for_decode())
            while True:
                hidden_states = tap.last_hidden_states(outputs.logits, batch)[:, 0]
                kept.of_model(outputs)
                model_kwargs = model._update_model_kwargs_for_generation(
                    outputs, model_kwargs, is_encoder_decoder=False
                )
                del outputs
                wanted = requests.at(input_ids)
                if return_logprobs or top_logprobs:
                    wanted |= logprobs
                drawn = sampler(hidden_states, temperature=temperature, **wanted)
                kept.of_step(drawn, unfinished)
                next_tokens = drawn.token_ids.to(device)
                requests.drawn(next_tokens, input_ids.shape[1])
                lost = next_tokens < 0
                next_tokens = next_tokens.clamp(min=0)  # -1 is no id: criteria look ids up, and the step fails below
                if ends:
                    lost &= unfinished
                    next_tokens = torch.where(unfinished, next_tokens, pad_token)
                input_ids = torch.cat([input_ids, next_tokens[:, None]], dim=-1)
                unfinished &= ~stopping_criteria(input_ids, None)
                going_on, failed = torch.stack(
                    [unfinished.any(), lost.any()]
                ).tolist()  # the step's one synchronisation
                if failed:
                    if sampler.tp is not None:
                        sampler.tp.check()
                    raise NoTokenError(lost.nonzero()[:, 0].tolist(), input_ids.shape[1] - prompt_length)
                for one in streamers:
                    one.put(next_tokens.cpu())
                if not going_on:
                    return (
                        kept.output(input_ids, model_kwargs) if generation_config.return_dict_in_generate else input_ids
                    )
                inputs = model.prepare_inputs_for_generation(
                    input_ids.clamp(min=0) if pads_below_0 else input_ids,
                    next_sequence_length=1 if model_kwargs["use_cache"] else None,
                    **model_kwargs,
                )
                outputs = tap.run(model, **inputs, return_dict=True)
    except BaseException:
        drop_adapter_hooks(model)
        raise
    finally:
        for one in streamers:  # after an error, too: whoever reads from them would wait for ever
            one.end()


class _Kept:
    """What goes into a ``GenerateOutput``, step for step."""

    def __init__(self, config: GenerationConfig) -> None:
        wanted = {"attentions": config.output_attentions, "hidden_states": config.output_hidden_states}
        wanted = {name: is_wanted and config.return_dict_in_generate for name, is_wanted in wanted.items()}
        self._of_model: dict[str, list[Any]] = {name: [] for name, is_wanted in wanted.items() if is_wanted}
        self._drawn: dict[str, list[Tensor]] = {}

    def of_model(self, outputs: Any) -> None:
        for name, steps in self._of_model.items():
            steps.append(outputs[name])

    def of_step(self, drawn: SampleOutput, unfinished: Tensor) -> None:
        for name in ("logprobs", "processed_logprobs", "ranks", "top_token_ids", "top_logprobs"):
            values = getattr(drawn, name)
            if values is not None:
                there = unfinished.to(values.device).view(-1, *[1] * (values.ndim - 1))
                ended = float("nan") if values.is_floating_point() else -1
                self._drawn.setdefault(name, []).append(torch.where(there, values, ended))

    def output(self, sequences: Any, model_kwargs: dict[str, Any]) -> GenerateOutput:
        cache = next((model_kwargs[name] for name in ALL_CACHE_NAMES if name in model_kwargs), None)
        of_model: dict[str, Any] = {name: tuple(steps) for name, steps in self._of_model.items()}
        drawn = {name: torch.stack(steps, dim=1) for name, steps in self._drawn.items()}
        return GenerateOutput(sequences=sequences, **{CACHE: cache}, **of_model, **drawn)
