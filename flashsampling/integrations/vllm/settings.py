"""What the environment says, and the releases of vLLM that are known."""

import re
from typing import NamedTuple

from ..engine.plugin import Plugin, Refused, switch

PLUGIN = Plugin("vLLM", "FLASHSAMPLING_VLLM", "vllm.flashsampling")
TENSOR_PARALLEL = "FLASHSAMPLING_VLLM_TP"
GRAPHS = "FLASHSAMPLING_VLLM_GRAPHS"


class Release(NamedTuple):
    """What is known of vLLM's model runner v2 in a minor release."""

    logits: tuple[str, ...]  # parameters of ``LogitsProcessor.forward``
    drafts_and_ranks: bool  # speculative decoding and tensor parallelism have been tried
    min_tokens_respects_grammar: bool  # where min_tokens forbids all that a grammar allows, it does not
    sampler: tuple[str, ...] = ()  # attributes of the sampler that say what else is asked of it


_LOGITS = ("self", "lm_head", "hidden_states", "embedding_bias")
_ASKS = "logits_processors", "return_sampling_mask", "trace_replay_state"
KNOWN = {"0.26": Release(_LOGITS, True, False), "0.33": Release((*_LOGITS, "skip_gather"), False, True, _ASKS)}

# What is overridden or called, by its parameters: a release that has other ones is another one, whatever its number.
RUNNER = {
    "add_requests": ("self", "scheduler_output"),
    "sample": ("self", "hidden_states", "input_batch", "grammar_output"),
    "sample_tokens": ("self", "grammar_output"),
    "_dummy_sampler_run": ("self", "hidden_states"),
    "shutdown": ("self",),
}
COUNTING = ("num_sampled", "seq_lens", "cu_num_logits", "idx_mapping", "prefill_len")


def tensor_parallel(ranks: int, drafts: bool) -> bool:
    """Whether so many ranks may share a head. If the environment does not say: as far as it was run and timed on GPUs."""
    wanted = switch(TENSOR_PARALLEL)
    return ranks == 2 and not drafts and graphs() if wanted is None else wanted


def graphs() -> bool:
    """Whether steps become CUDA graphs."""
    return switch(GRAPHS) is not False


def check_version(version: str) -> Release:
    """Refuses a release that nobody has tried."""
    number = re.match(r"\d+\.\d+", version)
    if number is None or number.group() not in KNOWN:
        known = ", ".join(f"{number}.x" for number in KNOWN)
        raise Refused(
            f"vLLM {version} is not one of the releases that are known to work: {known}, with model runner v2"
        )
    return KNOWN[number.group()]
