"""Chooses the launches of a step: one, or more where a row's logits are read more than once.

default parameters      ``fused.launch``: logits never leave the registers
logits in memory        ``filtered.dispatch``: two launches, three with log-probabilities, four with a kept set
anything else           ``fused.logits_gemm`` writes (B, V) float32 logits, from which ``filtered.dispatch`` draws;
                        ``recorded`` does so with any parameters
"""

from torch import Tensor

from ...exchange_protocol import WHOLE
from ...inputs import SampleInputs
from ...outputs import FilteredLogits, SampleResult
from ...sampling_params import DEFAULT_PARAMS, argument_names
from .filtered import dispatch
from .fused import config, launch
from .fused.logits_gemm import logits_gemm


def unsupported(step: SampleInputs) -> str | None:
    """Returns why the Triton backend does not support a step, or None if it does."""
    if step.logits is not None:
        return dispatch.unsupported(step)
    if step.params is not DEFAULT_PARAMS and step.shard != WHOLE:
        return f"a shard of a vocabulary with {argument_names(step.params.names())}"
    return config.unsupported(step) or step.too_wide_to_filter()


def run(step: SampleInputs) -> SampleResult:
    """Runs a step, as ``backends`` specifies."""
    if step.logits is not None:
        return dispatch.run(step)
    if step.params is DEFAULT_PARAMS:
        return launch.run(step)
    return dispatch.run(_with_logits(step))


def recorded(step: SampleInputs) -> FilteredLogits:
    """Runs a step and returns its processed logits and records too."""
    step = _with_logits(step)
    assert step.logits is not None
    records = dispatch.empty_records(len(step.logits), step.logits.device)
    drawn, logits = dispatch.run_with_processed(step, records=records)
    return FilteredLogits(drawn.ids, logits, *records)


def shard_logits(step: SampleInputs) -> Tensor:
    """Computes a shard's logits, as ``backends`` specifies: one launch."""
    return logits_gemm(step.hidden_states, step.weight, step.vocab_size)


def _with_logits(step: SampleInputs) -> SampleInputs:
    """Returns the step with (B, V) logits: computes them in one launch unless the step has them."""
    if step.logits is not None:
        return step
    return step._replace(logits=logits_gemm(step.hidden_states, step.weight, step.vocab_size))
