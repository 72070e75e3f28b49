"""What the environment says, and the releases of vLLM that are known."""

import inspect
import os
import re
from typing import Any, NamedTuple

VARIABLE = "FLASHSAMPLING_VLLM"
TENSOR_PARALLEL = "FLASHSAMPLING_VLLM_TP"
GRAPHS = "FLASHSAMPLING_VLLM_GRAPHS"
MODES = ("off", "auto", "require")


class Release(NamedTuple):
    """What is known of vLLM's model runner v2 in a minor release."""

    logits: tuple[str, ...]  # parameters of ``LogitsProcessor.forward``
    drafts_and_ranks: bool  # speculative decoding and tensor parallelism have been tried
    frees_stops: bool  # where min_tokens forbids all that a grammar allows, it does not
    on_gpus: bool  # the plug-in's tests have passed in it on a GPU, and it is timed
    sampler: tuple[str, ...] = ()  # attributes of the sampler that say what else is asked of it


_LOGITS = ("self", "lm_head", "hidden_states", "embedding_bias")
_ASKS = "logits_processors", "return_sampling_mask", "trace_replay_state"
KNOWN = {"0.26": Release(_LOGITS, True, False, True), "0.33": Release((*_LOGITS, "skip_gather"), False, True, False, _ASKS)}

# What is overridden or called, by its parameters: a release that has other ones is another one, whatever its number.
RUNNER = {
    "add_requests": ("self", "scheduler_output"),
    "sample": ("self", "hidden_states", "input_batch", "grammar_output"),
    "sample_tokens": ("self", "grammar_output"),
    "_dummy_sampler_run": ("self", "hidden_states"),
    "shutdown": ("self",),
}
COUNTING = ("num_sampled", "seq_lens", "cu_num_logits", "idx_mapping", "prefill_len")


class Refused(RuntimeError):
    """Why nothing is fused here. With ``FLASHSAMPLING_VLLM=require`` it is raised, else it is logged."""


def mode() -> str:
    """ "off", "auto" or "require"; ValueError if the environment says something else."""
    value = os.environ.get(VARIABLE, "") or "auto"
    if value not in MODES:
        raise ValueError(f"{VARIABLE} must be one of {', '.join(MODES)}, got {value!r}")
    return value


def check_default(seen: bool, what: str) -> None:
    """Refuses what was not seen to work on a GPU and timed there, unless somebody asked for the plug-in."""
    if not seen and not os.environ.get(VARIABLE):
        raise Refused(f"{what} was not run and timed on a GPU; {VARIABLE}=auto fuses all the same, {VARIABLE}=off stays silent")


def tensor_parallel(ranks: int, drafts: bool) -> bool:
    """Whether so many ranks may share a head. If the environment does not say: as far as it was run and timed on GPUs."""
    said = os.environ.get(TENSOR_PARALLEL, "")
    return said == "1" if said else ranks == 2 and not drafts and graphs()


def graphs() -> bool:
    """Whether steps become CUDA graphs."""
    return (os.environ.get(GRAPHS, "") or "1") == "1"


def check_version(version: str) -> Release:
    """Refuses a release that nobody has tried."""
    number = re.match(r"\d+\.\d+", version)
    if number is None or number.group() not in KNOWN:
        known = ", ".join(f"{number}.x" for number in KNOWN)
        raise Refused(f"vLLM {version} is not one of the releases that are known to work: {known}, with model runner v2")
    return KNOWN[number.group()]


def check_signature(name: str, function: Any, parameters: tuple[str, ...]) -> None:
    """Refuses what takes other parameters than the known releases'."""
    got = tuple(inspect.signature(function).parameters)
    if got != parameters:
        raise Refused(f"{name} takes {', '.join(got)} here, not {', '.join(parameters)}: this is not a vLLM that is known")
