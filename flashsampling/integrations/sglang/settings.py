"""What the environment says, and the releases of SGLang that are known."""

import inspect
import os
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

VARIABLE = "FLASHSAMPLING_SGLANG"
MODES = ("off", "auto", "require")

# What is overridden or called, by its parameters: a release that has other ones is another one, whatever its number.
_SIGNATURES: Mapping[str, tuple[str, ...]] = {
    "ModelRunner.load_model": ("self",),
    "ModelRunner.init_cuda_graphs": ("self", "capture_decode_cuda_graph"),
    "ModelRunner.sample": ("self", "logits_output", "forward_batch"),
    "ForwardBatch.init_new": ("batch", "model_runner"),
    "LogitsMetadata.from_forward_batch": ("forward_batch",),
    "LogitsProcessor.forward": (
        "self",
        "input_ids",
        "hidden_states",
        "lm_head",
        "logits_metadata",
        "aux_hidden_states",
        "hidden_states_before_norm",
    ),
    "LogitsProcessor._get_logits": ("self", "hidden_states", "lm_head", "logits_metadata", "embedding_bias"),
    "LogitsProcessor._get_pruned_states": (
        "self",
        "hidden_states",
        "hidden_states_before_norm",
        "aux_hidden_states",
        "logits_metadata",
    ),
    "SamplingBatchInfo.update_regex_vocab_mask": ("self",),
    "Sampler.forward": (
        "self",
        "logits_output",
        "sampling_info",
        "return_logprob",
        "top_logprobs_nums",
        "token_ids_logprobs",
        "positions",
    ),
}


class Release(NamedTuple):
    """What is known of a release of SGLang."""

    signatures: Mapping[str, tuple[str, ...]]
    resolves: bool = False  # a ``ServerArgs`` is what the user gave; what is in force is elsewhere
    forbids_ends: bool = False  # min_new_tokens forbids the model's own ends, too, not the tokenizer's alone
    beams: bool = False  # beam search takes the logits of its rows before anything is drawn
    aligns: bool = False  # deterministic inference: log-probabilities are those of a prefill, to the bit


KNOWN = {
    "0.5.15": Release(_SIGNATURES),
    "0.5.23": Release(
        {
            **_SIGNATURES,
            "ForwardBatch.init_new": (
                *_SIGNATURES["ForwardBatch.init_new"],
                "capture_hidden_mode",
                "return_hidden_states_before_norm",
                "extend_position_info",
                "spec_mrope_positions",
                "kv_loc_plan",
                "write_cols",
            ),
            "LogitsProcessor._get_logits": (*_SIGNATURES["LogitsProcessor._get_logits"], "use_logits_buffer"),
            "Sampler.forward": (*_SIGNATURES["Sampler.forward"], "logprob_logits"),
        },
        resolves=True,
        forbids_ends=True,
        beams=True,
        aligns=True,
    ),
}
BEAMS = ("batch", "forward_batch", "logits_output")  # parameters of what takes the beams' logits


class Refused(RuntimeError):
    """Why nothing is fused here. With ``FLASHSAMPLING_SGLANG=require`` SGLang does not start, else it is logged."""


def mode() -> str:
    """ "off", "auto" or "require"; ValueError if the environment says something else. Off unless it is asked for: no fused step
    has been seen in SGLang on a GPU yet."""
    value = os.environ.get(VARIABLE, "") or MODES[0]
    if value not in MODES:
        raise ValueError(f"{VARIABLE} must be one of {', '.join(MODES)}, got {value!r}")
    return value


def check_version(version: str) -> Release:
    """Refuses a release whose source nobody has read."""
    release = re.match(r"\d+\.\d+\.\d+", version)
    if release is None or release.group() not in KNOWN:
        raise Refused(f"SGLang {version} is not one of the releases that are known: {', '.join(KNOWN)}")
    return KNOWN[release.group()]


def check_signatures(classes: Mapping[str, type], release: Release) -> None:
    """Refuses classes whose methods take other parameters than the known release's."""
    for name, parameters in release.signatures.items():
        owner, _, method = name.partition(".")
        check_signature(name, getattr(classes[owner], method, None), parameters)


def check_signature(name: str, function: Any, parameters: tuple[str, ...]) -> None:
    """Refuses what is not there, or takes other parameters than the known release's."""
    if function is None:
        raise Refused(f"there is no {name} here: this is not an SGLang that is known")
    got = tuple(inspect.signature(function).parameters)
    if got != parameters:
        said = f"{name} takes {', '.join(got)} here, not {', '.join(parameters)}"
        raise Refused(f"{said}: this is not an SGLang that is known")


def describe(error: BaseException) -> Any:
    """What is said of an error: its words if it was refused, else all of it."""
    return str(error) if isinstance(error, Refused) else repr(error)
