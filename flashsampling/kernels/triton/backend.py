"""Chooses the launches of a step: one, or three where a row's logits are needed more than once.

default parameters    ``fused.launch``: logits never leave the registers
logits are given      ``filtered.dispatch``: two launches
anything else         ``fused.logits_gemm`` writes (B, V) float32 logits, from which ``filtered.dispatch`` draws;
                      ``recorded`` always does so
"""

from ...exchange_protocol import WHOLE
from ...inputs import DEFAULT_PARAMS, FilteredLogits, SampleInputs, SampleResult, SamplingParams, arguments
from .filtered import dispatch
from .fused import config, launch
from .fused.logits_gemm import logits_gemm

DOES = DOES_OF_LOGITS = SamplingParams._fields


def unsupported(step: SampleInputs) -> str | None:
    """Returns why the Triton backend cannot run a step, or None."""
    if step.logits is not None:
        return dispatch.unsupported(step)
    if step.params is not DEFAULT_PARAMS and step.shard != WHOLE:
        return f"a shard of a vocabulary with {arguments(step.params.names())}"
    return config.unsupported(step) or step.too_wide_to_pick()


def run(step: SampleInputs) -> SampleResult:
    """Runs a step (``backends``)."""
    if step.logits is not None:
        return dispatch.run(step)
    if step.params is DEFAULT_PARAMS:
        return launch.run(step)
    return dispatch.run(_with_logits(step))


def recorded(step: SampleInputs) -> FilteredLogits:
    """Runs a step of drafts for rejection (``backends``): three launches, or two where logits are given."""
    step = _with_logits(step)
    assert step.logits is not None
    records = dispatch.empty_records(len(step.logits), step.logits.device)
    return FilteredLogits(dispatch.run(step, records=records).ids, step.logits, *records)


def _with_logits(step: SampleInputs) -> SampleInputs:
    """Adds logits to a step in one launch, unless they are given."""
    if step.logits is not None:
        return step
    return step._replace(logits=logits_gemm(step.hidden_states, step.weight, step.vocab_size))
