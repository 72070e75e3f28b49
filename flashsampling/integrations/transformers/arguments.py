"""Checks and converts the arguments of ``generate``."""

import functools
import inspect
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig
from transformers.generation import GenerationMixin, GenerationMode
from transformers.generation.utils import ALL_CACHE_NAMES

from ...row_params import Reals, reals
from ...sampler import LMHeadSampler
from ...sampling_params import SamplingOptions

# Name of a model's cache argument and output: "past_key_values" up to transformers 5.23, "cache" from 5.24 on
CACHE: str = ALL_CACHE_NAMES[0]
# Arguments that make ``GenerationConfig.get_generation_mode`` choose neither sampling nor greedy search
_OTHER_MODES = (
    "num_beams", "num_beam_groups", "penalty_alpha", "prompt_lookup_num_tokens", "assistant_early_exit", "use_mtp",
    "dola_layers", "constraints", "force_words_ids",
)  # fmt: skip


def require_transformers_loop(model: Any) -> None:
    """Raises ValueError for a model class with a decoding loop of its own, which ``custom_generate`` would replace."""
    own = getattr(type(model), "_sample", None)
    if own is not GenerationMixin._sample:
        raise ValueError(
            f"{type(model).__name__} has a decoding loop of its own (_sample), which the fused step does not know"
        )


def require_supported(
    config: GenerationConfig, assistant_model: Any, synced_gpus: bool, logprobs: SamplingOptions
) -> bool:
    """Returns whether the generation is one with drafts.

    Raises a ValueError that names arguments of ``generate`` that the fused step does not support."""
    if config.return_dict_in_generate:
        for name in ("output_scores", "output_logits"):
            if getattr(config, name):
                raise ValueError(
                    f"{name} is not supported: logits are never in memory; return_logprobs=True gives the drawn "
                    "tokens' log-probabilities"
                )
    for name, wanted in logprobs.items():
        if wanted and not config.return_dict_in_generate:
            raise ValueError(f"{name} needs return_dict_in_generate=True, got False")
    mode = config.get_generation_mode(assistant_model)
    drafted = mode == GenerationMode.ASSISTED_GENERATION and config.assistant_early_exit is None
    drafted = drafted and not getattr(config, "use_mtp", None)
    if not drafted and mode not in (GenerationMode.SAMPLE, GenerationMode.GREEDY_SEARCH):
        values = {name: getattr(config, name, None) for name in _OTHER_MODES}
        given = [f"{name}={value!r}" for name, value in values.items() if value and not (value == 1 and "beam" in name)]
        given += [] if assistant_model is None else ["assistant_model"]
        raise ValueError(f"the fused step samples or decodes greedily, got {mode.value} ({', '.join(given)})")
    if drafted and any(logprobs.values()):
        names = ", ".join(name for name, wanted in logprobs.items() if wanted)
        raise ValueError(f"{names} is not supported with drafts, of which the ids alone are known")
    if synced_gpus:
        raise ValueError("synced_gpus is not supported, nor are FSDP and DeepSpeed ZeRO-3, which set it")
    if config.compile_config is not None:
        raise ValueError("compile_config is not supported: compile the decoder instead, model.get_decoder().compile()")
    return drafted


def row_temperatures(temperatures: Reals, config: GenerationConfig, batch: int, device: torch.device) -> Reals:
    """Returns a temperature per row on the device.

    Raises TypeError or ValueError for another shape, greedy decoding, or a negative number."""
    if not config.do_sample:
        raise ValueError("temperatures needs do_sample=True, got do_sample=False, which is greedy")
    rows = temperatures.to(device) if isinstance(temperatures, Tensor) else temperatures
    return reals("temperatures", rows, batch, device)


def require_matching_sampler(head: nn.Linear, sampler: LMHeadSampler) -> None:
    """Raises TypeError or ValueError unless the sampler has this head, or its shard."""
    if not isinstance(sampler, LMHeadSampler):
        raise TypeError(f"sampler must be an LMHeadSampler, got {type(sampler).__name__}")
    if not _is_same(sampler.weight, head.weight, sampler):
        raise ValueError(
            "sampler must be over this model's LM head (LMHeadSampler.from_model), got one over another weight, shape "
            f"{tuple(sampler.weight.shape)}"
        )
    if not _is_same(sampler.bias, head.bias, sampler):
        raise ValueError(
            "sampler must have the bias of this model's LM head (LMHeadSampler.from_model), got one "
            + ("without" if sampler.bias is None else "with another")
        )


def _is_same(ours: Tensor | None, models: Tensor | None, sampler: LMHeadSampler) -> bool:
    """Returns whether both are the same memory, or if the sampler has a shard, whether both have the same values."""
    if ours is None or models is None:
        return ours is models
    if sampler.tp is not None:
        models = models[sampler.tp.first_token : sampler.tp.last_token]
        ours = ours[: len(models)]
        return (ours.dtype, ours.device) == (models.dtype, models.device) and torch.equal(ours, models)
    return ours.is_set_to(models)


def read_generate_arguments(model: Any) -> dict[str, Any]:
    """Returns ``streamer``, ``assistant_model`` and ``synced_gpus`` of the ``model.generate`` call that called us.

    transformers (5.3 to 5.24) passes none of them to a ``custom_generate`` callable, so they are read from its frame.
    Otherwise readers of a streamer would wait for ever, and an assistant would be silently ignored.
    """
    frame = next(_generate_frames(model), None)
    names = ("streamer", "assistant_model", "synced_gpus")
    return {} if frame is None else {name: frame.f_locals.get(name) for name in names}


def _generate_frames(model: Any) -> Iterator[FrameType]:
    """Yields the frames of the calls of ``model.generate`` that we are in, the innermost first."""
    code = inspect.unwrap(GenerationMixin.generate).__code__
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is code and frame.f_locals.get("self") is model:
            yield frame
        frame = frame.f_back


def drop_adapter_hooks(model: Any) -> None:
    """Removes the hooks of PEFT's ``generate(adapter_names=...)``.

    An error that passes through PEFT (0.21) leaves them on the model, and they would affect later generations. Does
    nothing inside another generation of this model, which may own the hooks.
    """
    if len(list(_generate_frames(model))) != 1:
        return
    for module in model.modules():
        for key, hook in list(module._forward_pre_hooks.items()):
            if isinstance(hook, functools.partial) and hook.keywords.keys() & {"adapter_names", "alora_offsets"}:
                module._forward_pre_hooks.pop(key, None)
                module._forward_pre_hooks_with_kwargs.pop(key, None)
