"""Which launches a step takes: one, or where a row's logits must be seen more than once, three.

nothing is asked for    ``launch``: logits never leave the registers
logits are there        ``logits``: two launches
anything else           ``logits_gemm`` writes (B, V) float32 logits, of which ``logits`` makes the rest; and so for
``recorded``,
                        whatever is asked for
"""

from ...exchange_protocol import WHOLE
from ...inputs import SampleInputs
from ...outputs import FilteredLogits, SampleResult
from ...sampling_params import DEFAULT_PARAMS, argument_names
from .filtered import dispatch
from .fused import config, launch
from .fused.logits_gemm import logits_gemm


def unsupported(step: SampleInputs) -> str | None:
    """Why the Triton implementation cannot do a step, or None."""
    if step.logits is not None:
        return dispatch.unsupported(step)
    if step.params is not DEFAULT_PARAMS and step.shard != WHOLE:
        return f"a shard of a vocabulary with {argument_names(step.params.names())}"
    return config.unsupported(step) or step.too_wide_to_pick()


def run(step: SampleInputs) -> SampleResult:
    """See ``backends``."""
    if step.logits is not None:
        return dispatch.run(step)
    if step.params is DEFAULT_PARAMS:
        return launch.run(step)
    return dispatch.run(_with_logits(step))


def recorded(step: SampleInputs) -> FilteredLogits:
    """See ``backends``: three launches, or two where logits are there."""
    step = _with_logits(step)
    assert step.logits is not None
    records = dispatch.empty_records(len(step.logits), step.logits.device)
    return FilteredLogits(dispatch.run(step, records=records).ids, step.logits, *records)


def _with_logits(step: SampleInputs) -> SampleInputs:
    """One launch, unless they are there."""
    if step.logits is not None:
        return step
    return step._replace(logits=logits_gemm(step.hidden_states, step.weight, step.vocab_size))
