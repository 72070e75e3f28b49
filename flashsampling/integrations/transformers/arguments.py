"""Checks and converts the arguments of ``generate``."""

import functools
import inspect
import sys
from collections.abc import Iterable, Iterator
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig
from transformers.generation import GenerationMixin, GenerationMode
from transformers.generation.utils import ALL_CACHE_NAMES

from ...row_params import integer
from ...sampler import LMHeadSampler
from ...sampling_params import SamplingOptions

# Name of a model's cache argument and output: "past_key_values" up to transformers 5.23, "cache" from 5.24 on
CACHE: str = ALL_CACHE_NAMES[0]
# Logits processor -> the argument that makes transformers add it, with the value that switches it off
SWITCH_OFF = {
    "EncoderNoRepeatNGramLogitsProcessor": "encoder_no_repeat_ngram_size=0",
    "EncoderRepetitionPenaltyLogitsProcessor": "encoder_repetition_penalty=1.0",
    "EpsilonLogitsWarper": "epsilon_cutoff=0.0",
    "EtaLogitsWarper": "eta_cutoff=0.0",
    "ExponentialDecayLengthPenalty": "exponential_decay_length_penalty=None",
    "ForcedBOSTokenLogitsProcessor": "forced_bos_token_id=None",
    "ForcedEOSTokenLogitsProcessor": "forced_eos_token_id=None",
    "InfNanRemoveLogitsProcessor": "remove_invalid_values=False",
    "MinLengthLogitsProcessor": "min_length=0",
    "MinNewTokensLengthLogitsProcessor": "min_new_tokens=None",
    "MinPLogitsWarper": "min_p=None",
    "NoBadWordsLogitsProcessor": "bad_words_ids=None",
    "NoRepeatNGramLogitsProcessor": "no_repeat_ngram_size=0",
    "PrefixConstrainedLogitsProcessor": "prefix_allowed_tokens_fn=None",
    "RepetitionPenaltyLogitsProcessor": "repetition_penalty=1.0",
    "SequenceBiasLogitsProcessor": "sequence_bias=None",
    "SuppressTokensAtBeginLogitsProcessor": "begin_suppress_tokens=None",
    "SuppressTokensLogitsProcessor": "suppress_tokens=None",
    "SynthIDTextWatermarkLogitsProcessor": "watermarking_config=None",
    "TemperatureLogitsWarper": "temperature=1.0",
    "TopHLogitsWarper": "top_h=None",
    "TopKLogitsWarper": "top_k=0",
    "TopPLogitsWarper": "top_p=1.0",
    "TypicalLogitsWarper": "typical_p=1.0",
    "UnbatchedClassifierFreeGuidanceLogitsProcessor": "guidance_scale=None",
    "WatermarkLogitsProcessor": "watermarking_config=None",
}
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
) -> None:
    """Raises a ValueError that names arguments of ``generate`` that the fused step does not support."""
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
    if config.is_assistant:
        raise ValueError("is_assistant is not supported: a model that drafts for another needs scores")
    if synced_gpus:
        raise ValueError("synced_gpus is not supported, nor are FSDP and DeepSpeed ZeRO-3, which set it")
    if config.compile_config is not None:
        raise ValueError("compile_config is not supported: compile the decoder instead, model.get_decoder().compile()")


def row_temperatures(temperatures: Any, config: GenerationConfig, batch: int, device: torch.device) -> Tensor:
    """Returns temperatures as (B,) float32 on the device.

    Raises ValueError for another shape, greedy decoding, or a negative number on the CPU."""
    if not config.do_sample:
        raise ValueError("temperatures needs do_sample=True, got do_sample=False, which is greedy")
    rows = torch.as_tensor(temperatures, dtype=torch.float32)
    _require_row_each("temperatures", rows, config, batch)
    if rows.device.type == "cpu" and not bool((rows >= 0).all()):
        raise ValueError(f"temperatures must be at least 0, got {rows.tolist()}")
    return rows.to(device)


def require_no_seeds(seeds: Any) -> None:
    """Raises a TypeError that names ``seed`` if ``seeds`` is given."""
    if seeds is not None:
        raise TypeError("seeds is called seed: give seed=, one int or one for each sequence")


def row_seeds(seed: Any, config: GenerationConfig, batch: int) -> Tensor | int:
    """Returns seeds as (B,) int64, or an int unchanged.

    Raises TypeError for anything but integers, ValueError for another shape or more than 64 bits."""
    if not isinstance(seed, Iterable) or getattr(seed, "ndim", 1) == 0:
        return integer("seed", _to_scalar(seed))
    if not isinstance(seed, Tensor):
        values = [integer("every seed", _to_scalar(one)) for one in seed]
        if not all(-(2**63) <= one < 2**64 for one in values):
            raise ValueError(f"seed must have 64 bits each, got {values}")
        seed = torch.tensor([one - 2**64 if one >= 2**63 else one for one in values], dtype=torch.int64)
    if seed.is_floating_point() or seed.is_complex() or seed.dtype == torch.bool:
        raise TypeError(f"seed must be integers, got {seed.dtype}")
    _require_row_each("seed", seed, config, batch)
    return seed.to(torch.int64)


def _to_scalar(seed: Any) -> Any:
    """Converts a 0-d tensor or array, which ``list(tensor)`` holds, to a number."""
    return seed.item() if getattr(seed, "ndim", None) == 0 and hasattr(seed, "item") else seed


def _require_row_each(name: str, rows: Tensor, config: GenerationConfig, batch: int) -> None:
    if rows.shape != (batch,):
        returned = config.num_return_sequences or 1
        sequences = f"{batch} sequences" + (
            f", {batch // returned} prompts x {returned} returned sequences" if returned > 1 else ""
        )
        raise ValueError(f"{name} must have one entry for each of the {sequences}, got shape {tuple(rows.shape)}")


def require_matching_sampler(head: nn.Linear, sampler: LMHeadSampler, batch: int) -> None:
    """Raises TypeError or ValueError unless the sampler has this head, or its shard, and room for ``batch`` rows."""
    if not isinstance(sampler, LMHeadSampler):
        raise TypeError(f"sampler must be an LMHeadSampler, got {type(sampler).__name__}")
    if batch > sampler.max_batch_size:
        raise ValueError(
            f"input_ids must have at most max_batch_size = {sampler.max_batch_size} rows with this sampler, got {batch}"
        )
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


def require_matching_transform(sampler: LMHeadSampler, logit_scale: float, soft_cap: float) -> None:
    """Raises ValueError unless the sampler has the model's scale and soft cap."""
    if (sampler.logit_scale, sampler.soft_cap) != (logit_scale, soft_cap):
        raise ValueError(
            f"sampler must have logit_scale={logit_scale:g}, soft_cap={soft_cap:g} with this model "
            f"(LMHeadSampler.from_model), got logit_scale={sampler.logit_scale:g}, soft_cap={sampler.soft_cap:g}"
        )


def _is_same(ours: Tensor | None, models: Tensor | None, sampler: LMHeadSampler) -> bool:
    """Returns whether both are the same memory, or if the sampler has a shard, whether both have the same values."""
    if ours is None or models is None or ours is models:
        return ours is models
    if sampler.tp is not None:
        models = models[sampler.tp.first_token : sampler.tp.last_token]
        ours = ours[: len(models)]
        return (ours.dtype, ours.device) == (models.dtype, models.device) and torch.equal(ours, models)
    return (ours.data_ptr(), ours.shape, ours.stride(), ours.dtype) == (
        models.data_ptr(), models.shape, models.stride(), models.dtype
    )  # fmt: skip


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
    """Removes the hooks of PEFT's ``generate(adapter_names=...)``, if PEFT called the ``model.generate`` that called
    us.

    An error that passes through PEFT (0.21) leaves them on the model, and they would affect later generations. Does
    nothing inside another generation of this model, which may own the hooks.
    """
    callers = [_caller_module(frame) for frame in _generate_frames(model)]
    if len(callers) != 1 or not callers[0].startswith("peft."):
        return
    for module in model.modules():
        for key, hook in list(module._forward_pre_hooks.items()):
            if isinstance(hook, functools.partial) and hook.keywords.keys() & {"adapter_names", "alora_offsets"}:
                module._forward_pre_hooks.pop(key, None)
                module._forward_pre_hooks_with_kwargs.pop(key, None)


def _caller_module(frame: FrameType) -> str:
    """Returns the module that called this frame, apart from decorators of torch and transformers."""
    caller = frame.f_back
    while caller is not None and caller.f_globals.get("__name__", "").startswith(("torch.", "transformers.")):
        caller = caller.f_back
    return "" if caller is None else str(caller.f_globals.get("__name__", ""))
