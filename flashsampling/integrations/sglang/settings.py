"""What the environment says, and the releases of SGLang that are known."""

import re
from collections.abc import Mapping
from typing import NamedTuple

from ..engine.plugin import Plugin, Refused

PLUGIN = Plugin("SGLang", "FLASHSAMPLING_SGLANG", "sglang.flashsampling")

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
        PLUGIN.check_signature(name, getattr(classes[owner], method, None), parameters)
