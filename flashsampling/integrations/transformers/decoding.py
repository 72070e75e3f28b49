"""The decoding loop."""

import inspect
from collections.abc import Sequence
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
from ...row_params import Reals
from ...sampler import LMHeadSampler
from ...sampling_params import SamplingOptions
from .arguments import (
    CACHE,
    drop_adapter_hooks,
    read_generate_arguments,
    require_matching_sampler,
    require_supported,
    require_transformers_loop,
    row_temperatures,
)
from .assisted import CachedModel, TargetSampler, decode, make_drafter, require_supported_drafts
from .errors import NoTokenError
from .head import HeadTap, get_lm_head
from .processor_params import StepParams
from .processors import read_processors

if "is_first_iteration" not in inspect.signature(GenerationMixin._prefill).parameters:
    raise ImportError(
        f"flashsampling.integrations.transformers needs transformers 5.3 or newer, got {transformers.__version__}"
    )


@dataclass
class GenerateOutput(GenerateDecoderOnlyOutput):
    """Output of ``generate`` with ``return_dict_in_generate=True``.

    It has transformers' own fields, of which ``scores`` and ``logits`` are None, and these:

    Attributes:
        logprobs: (B, new tokens) float32, with ``return_logprobs=True``: log softmax of the model's logits at the drawn
            token. NaN behind the end of a sequence.
        processed_logprobs: the same for the distribution that the token was drawn from, after all processing. With
            ``do_sample=False`` this is the distribution at temperature 1 over all tokens that are not masked.
        ranks: (B, new tokens) int64: 1 + the number of tokens with a larger logit of the model; -1 behind the end.
        top_token_ids: (B, new tokens, n) int64, with ``top_logprobs=n``: the tokens with the model's highest logits.
        top_logprobs: (B, new tokens, n) float32: their log softmax.
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
    return_logprobs: bool = False,
    top_logprobs: int = 0,
    request: SamplingOptions | None = None,
    **model_kwargs: Any,
) -> Tensor | GenerateOutput:
    """Decoding loop for ``model.generate(..., custom_generate=generate)``. docs/transformers.md has all arguments and
    models.

    Several threads may generate with one model, each with a sampler of its own, while others call it plainly. With
    ``assistant_model`` or ``prompt_lookup_num_tokens``, given to ``model.generate``, the model runs over several drafts
    at once, for one sequence. Tokens are those without drafts, as far as hidden states are equal.

    Args:
        model, input_ids, logits_processor, stopping_criteria, generation_config, synced_gpus, streamer, model_kwargs:
            from transformers. The streamer gets the prompt and every step's (B,) ids, and ``end`` also after an error.
        sampler: an ``LMHeadSampler.from_model(model)``, to keep its state or to name an ``impl``; None makes one.
        seed: one per returned sequence, whose tokens then depend only on its own seed, prompt and temperature. An int
            derives one per sequence. None keeps the sampler's seeds, or draws them from torch's default generator.
        temperatures: one per returned sequence, 0 for greedy; None uses ``generation_config.temperature`` for all.
        return_logprobs: fills ``logprobs``, ``processed_logprobs`` and ``ranks`` of a ``GenerateOutput``.
        top_logprobs: up to 20; fills ``top_token_ids`` and ``top_logprobs``.
        request: sampling parameters of ``flashsampling.sample``, for all rows or one per returned sequence:
            ``logit_bias``, ``token_mask``, the penalties, and the filters except ``joint_top_p``. Each replaces its
            field of ``generation_config`` (None too, but not of ``sequence_bias``); a mask is added.

    Returns:
        (B, T + new tokens) int64 token ids; sequences that ended early are padded with the pad token. Or a
        ``GenerateOutput``, with ``return_dict_in_generate=True``.

    Raises:
        ValueError: the fused step cannot do what the generation asks for: logits processors without a counterpart or in
            another order, beams, scores or logits in the output, drafts for several sequences or with a cache that
            cannot be cut back, a model that changes its logits by more than a scale and a soft cap
            (``checked_lm_head``), or a seed, temperatures or a sampler that do not fit. Raised before the first token.
        TypeError: ``request`` has an unknown name.
        NoTokenError: a sequence's logits hold a NaN, or no finite value, or no token is allowed.
        flashsampling.tensor_parallel.TensorParallelError: as in ``flashsampling.sample``.

    Example:
        >>> import torch, transformers
        >>> from flashsampling.integrations.transformers import generate
        >>> sizes = {"vocab_size": 1000, "n_embd": 8, "n_layer": 1, "n_head": 1}
        >>> config = transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=None)
        >>> model = transformers.GPT2LMHeadModel(config)  # its weights are random
        >>> prompts = torch.tensor([[5, 6], [7, 8]])
        >>> options = {"do_sample": True, "top_p": 0.9, "max_new_tokens": 4, "seed": [1, 2]}
        >>> model.generate(prompts, custom_generate=generate, **options).shape
        torch.Size([2, 6])
    """
    given = read_generate_arguments(model)
    streamer = given.get("streamer") if streamer is None else streamer
    synced_gpus = given.get("synced_gpus") if synced_gpus is None else synced_gpus
    try:
        if generation_config is None or stopping_criteria is None or logits_processor is None:
            raise ValueError("generate is called by model.generate(..., custom_generate=generate), not by itself")
        logprobs: SamplingOptions = {"return_logprobs": return_logprobs, "top_logprobs": top_logprobs}
        require_transformers_loop(model)
        assistant, batch = given.get("assistant_model"), input_ids.shape[0]
        drafted = require_supported(generation_config, assistant, bool(synced_gpus), logprobs)
        if drafted:
            require_supported_drafts(generation_config, assistant, sampler, batch, model_kwargs)
        processed = read_processors(logits_processor, bool(generation_config.do_sample))
        head = get_lm_head(model)
        vocab_size, device = head.weight.shape[0], head.weight.device
        mask = model_kwargs.get("attention_mask")
        params = StepParams(processed, input_ids, vocab_size, device, {} if request is None else request, mask)
        temperature: Reals = processed.temperature
        if temperatures is not None:
            temperature = row_temperatures(temperatures, generation_config, batch, device)
        if sampler is None:
            sampler = LMHeadSampler(head, max_batch_size=max(batch, 1))
        require_matching_sampler(head, sampler)
        if seed is not None:
            sampler.reset(seed, rows=slice(0, batch))
        pad_token = _pad_token(generation_config, stopping_criteria)
        # transformers gave us a copy of the configuration; a graph compiled earlier does not have our hooks
        generation_config.disable_compile = True
        target, outputs = TargetSampler(sampler, temperature, params), _Outputs(generation_config)
        loop = (generation_config, stopping_criteria, streamer)
        with HeadTap(model, head) as tap:
            if drafted:
                with make_drafter(generation_config, assistant, head, input_ids, model_kwargs, target) as drafter:
                    cached = CachedModel(model, tap, model_kwargs, input_ids.shape[1])
                    input_ids = decode(cached, drafter, target, input_ids, *loop)
            else:
                wanted = logprobs if any(logprobs.values()) else {}
                input_ids, model_kwargs = _decode(
                    model, tap, target, input_ids, *loop, model_kwargs, pad_token, outputs, wanted
                )
        return outputs.output(input_ids, model_kwargs) if generation_config.return_dict_in_generate else input_ids
    except BaseException:
        drop_adapter_hooks(model)
        raise
    finally:
        if streamer is not None:  # after an error too: its readers would wait for ever
            streamer.end()


def _pad_token(config: GenerationConfig, stopping_criteria: StoppingCriteriaList) -> Tensor | None:
    """Returns the pad token if sequences may end at different lengths, else None."""
    if not any(hasattr(criterion, "eos_token_id") for criterion in stopping_criteria):
        return None
    if config._pad_token_tensor is None:
        raise ValueError("pad_token_id must be given where sequences end at different lengths, got None")
    return config._pad_token_tensor  # type: ignore[no-any-return]


def _decode(
    model: Any,
    tap: HeadTap,
    target: TargetSampler,
    input_ids: Tensor,  # (B, T)
    config: GenerationConfig,
    stopping_criteria: StoppingCriteriaList,
    streamer: BaseStreamer | None,
    model_kwargs: dict[str, Any],
    pad_token: Tensor | None,
    collected: "_Outputs",
    logprobs: SamplingOptions,
) -> tuple[Tensor, dict[str, Any]]:
    """Decodes without drafts. Returns the sequences, (B, T + new tokens), and the model's arguments with its cache."""
    sampler, _, params = target
    batch, prompt_length = input_ids.shape
    device = input_ids.device
    unfinished = torch.ones(batch, dtype=torch.bool, device=device)
    pad_token = None if pad_token is None else pad_token.to(device)
    pads_below_0 = pad_token is not None and bool((pad_token < 0).any())
    outputs = tap.run(model._prefill, input_ids, config, model_kwargs, is_first_iteration=True)
    with model._optimize_model_for_decode():
        while True:
            given = tap.read(outputs.logits, batch)
            collected.add_model_outputs(outputs)
            model_kwargs = model._update_model_kwargs_for_generation(outputs, model_kwargs, is_encoder_decoder=False)
            del outputs
            sample = sampler(given.hidden_states[:, 0], **target.options(given, params.at(input_ids)) | logprobs)
            collected.add_sample(sample, unfinished)
            next_tokens = sample.token_ids.to(device)
            params.count(next_tokens, input_ids.shape[1])
            lost = next_tokens < 0
            next_tokens = next_tokens.clamp(min=0)  # criteria index with ids; a row without a token raises below
            if pad_token is not None:
                lost &= unfinished
                next_tokens = torch.where(unfinished, next_tokens, pad_token)
            input_ids = torch.cat([input_ids, next_tokens[:, None]], dim=-1)
            unfinished &= ~stopping_criteria(input_ids, None)
            continues, failed = torch.stack([unfinished.any(), lost.any()]).tolist()  # the step's one synchronisation
            if failed:
                if sampler.tp is not None:
                    sampler.tp.check()
                raise NoTokenError(lost.nonzero()[:, 0].tolist(), input_ids.shape[1] - prompt_length)
            if streamer is not None:
                streamer.put(next_tokens.cpu())
            if not continues:
                return input_ids, model_kwargs
            inputs = model.prepare_inputs_for_generation(
                input_ids.clamp(min=0) if pads_below_0 else input_ids,
                next_sequence_length=1 if model_kwargs["use_cache"] else None,
                **model_kwargs,
            )
            outputs = tap.run(model, **inputs, return_dict=True)


class _Outputs:
    """Collects the fields of a ``GenerateOutput``, step by step."""

    def __init__(self, config: GenerationConfig) -> None:
        wanted = {"attentions": config.output_attentions, "hidden_states": config.output_hidden_states}
        wanted = {name: is_wanted and config.return_dict_in_generate for name, is_wanted in wanted.items()}
        self._model_outputs: dict[str, list[Any]] = {name: [] for name, is_wanted in wanted.items() if is_wanted}
        self._samples: dict[str, list[Tensor]] = {}

    def add_model_outputs(self, outputs: Any) -> None:
        for name, steps in self._model_outputs.items():
            steps.append(outputs[name])

    def add_sample(self, drawn: SampleOutput, unfinished: Tensor) -> None:
        for name in ("logprobs", "processed_logprobs", "ranks", "top_token_ids", "top_logprobs"):
            values = getattr(drawn, name)
            if values is not None:
                there = unfinished.to(values.device).view(-1, *[1] * (values.ndim - 1))
                ended = float("nan") if values.is_floating_point() else -1
                self._samples.setdefault(name, []).append(torch.where(there, values, ended))

    def output(self, sequences: Any, model_kwargs: dict[str, Any]) -> GenerateOutput:
        cache = next((model_kwargs[name] for name in ALL_CACHE_NAMES if name in model_kwargs), None)
        model_outputs: dict[str, Any] = {name: tuple(steps) for name, steps in self._model_outputs.items()}
        samples = {name: torch.stack(steps, dim=1) for name, steps in self._samples.items()}
        return GenerateOutput(sequences=sequences, **{CACHE: cache}, **model_outputs, **samples)
