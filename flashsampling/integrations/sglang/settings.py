"""The environment variable of the plug-in for SGLang, and the releases that are known."""

from collections.abc import Mapping
from typing import NamedTuple

from ..engine.plugin import Plugin, known_release

PLUGIN = Plugin("SGLang", "FLASHSAMPLING_SGLANG", "sglang.flashsampling")

# What is overridden or called, by its parameters: a release with other ones is another release, whatever its number.
_LOGITS = "self hidden_states lm_head logits_metadata embedding_bias"
_SAMPLER = "self logits_output sampling_info return_logprob top_logprobs_nums token_ids_logprobs positions"
_PROCESSOR = "self input_ids hidden_states lm_head logits_metadata aux_hidden_states hidden_states_before_norm"
_PRUNED = "self hidden_states hidden_states_before_norm aux_hidden_states logits_metadata"
_SIGNATURES: Mapping[str, str] = {
    "ModelRunner.load_model": "self",
    "ModelRunner.init_cuda_graphs": "self capture_decode_cuda_graph",
    "ModelRunner.sample": "self logits_output forward_batch",
    "ForwardBatch.init_new": "batch model_runner",
    "LogitsMetadata.from_forward_batch": "forward_batch",
    "LogitsProcessor.forward": _PROCESSOR,
    "LogitsProcessor._get_logits": _LOGITS,
    "LogitsProcessor._get_pruned_states": _PRUNED,
    "SamplingBatchInfo.update_regex_vocab_mask": "self",
    "Sampler.forward": _SAMPLER,
}
_NEWER = {
    "ForwardBatch.init_new": "batch model_runner capture_hidden_mode return_hidden_states_before_norm "
    "extend_position_info spec_mrope_positions kv_loc_plan write_cols",
    "LogitsProcessor._get_logits": f"{_LOGITS} use_logits_buffer",
    "Sampler.forward": f"{_SAMPLER} logprob_logits",
}
BEAMS = ("batch", "forward_batch", "logits_output")  # parameters of the function that takes the beams' logits


class SglangRelease(NamedTuple):
    """Differences between releases of SGLang."""

    signatures: Mapping[str, str]
    resolves: bool = False  # a ``ServerArgs`` is what the user gave; what is in force is elsewhere
    forbids_ends: bool = False  # min_new_tokens forbids the model's own ends, too, not the tokenizer's alone
    beams: bool = False  # beam search takes the logits of its rows before anything is drawn
    aligns: bool = False  # deterministic inference: log-probabilities are those of a prefill, to the bit


KNOWN = {
    "0.5.15": SglangRelease(_SIGNATURES),
    "0.5.23": SglangRelease({**_SIGNATURES, **_NEWER}, resolves=True, forbids_ends=True, beams=True, aligns=True),
}


def check_version(version: str) -> SglangRelease:
    """Returns the release of a version. Refuses an unknown release."""
    return known_release(f"SGLang {version}", r"\d+\.\d+\.\d+", KNOWN, f"releases that are known: {', '.join(KNOWN)}")


def check_signatures(classes: Mapping[str, type], release: SglangRelease) -> None:
    """Refuses classes whose methods take other parameters than in the known release."""
    for name, parameters in release.signatures.items():
        owner, _, method = name.partition(".")
        PLUGIN.check_signature(name, getattr(classes[owner], method, None), tuple(parameters.split()))
