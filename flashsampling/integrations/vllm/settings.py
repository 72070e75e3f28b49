"""Environment variables of the plug-in for vLLM, and the releases that are known."""

from typing import NamedTuple

from ..engine.plugin import Plugin, known_release, switch

PLUGIN = Plugin("vLLM", "FLASHSAMPLING_VLLM", "vllm.flashsampling")
TENSOR_PARALLEL = "FLASHSAMPLING_VLLM_TP"
GRAPHS = "FLASHSAMPLING_VLLM_GRAPHS"


class VllmRelease(NamedTuple):
    """Differences of vLLM's model runner v2 between minor releases."""

    logits: tuple[str, ...]  # parameters of ``LogitsProcessor.forward``
    drafts_and_ranks: bool  # speculative decoding and tensor parallelism have been tried
    min_tokens_respects_grammar: bool  # min_tokens forbids nothing where it would forbid all that a grammar allows


_LOGITS = ("self", "lm_head", "hidden_states", "embedding_bias")
KNOWN = {
    "0.26": VllmRelease(_LOGITS, True, False),
    "0.33": VllmRelease((*_LOGITS, "skip_gather"), False, True),
}

# What is overridden or called, by its parameters: a release with other ones is another release, whatever its number.
RUNNER = {
    "add_requests": ("self", "scheduler_output"),
    "sample": ("self", "hidden_states", "input_batch", "grammar_output"),
    "sample_tokens": ("self", "grammar_output"),
    "_dummy_sampler_run": ("self", "hidden_states"),
    "shutdown": ("self",),
}
COUNTING = ("num_sampled", "seq_lens", "cu_num_logits", "idx_mapping", "prefill_len")


def tensor_parallel(ranks: int, drafts: bool) -> bool:
    """Returns whether so many ranks may share a head. By default: as far as it was run and timed on GPUs."""
    chosen = switch(TENSOR_PARALLEL)
    return ranks == 2 and not drafts and graphs() if chosen is None else chosen


def graphs() -> bool:
    """Returns whether steps become CUDA graphs."""
    return switch(GRAPHS) is not False


def check_version(version: str) -> VllmRelease:
    """Returns the release of a version. Refuses an untried release."""
    known = ", ".join(f"{number}.x" for number in KNOWN)
    words = f"releases that are known to work: {known}, with model runner v2"
    return known_release(f"vLLM {version}", r"\d+\.\d+", KNOWN, words)
