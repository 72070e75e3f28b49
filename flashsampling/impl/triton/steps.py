"""Which launches a step takes: one, or where a row's logits must be seen more than once, three.

nothing is asked for    ``launch``: logits never leave the registers
logits are there        ``logits``: two launches
anything else           ``products`` writes (B, V) float32 logits, of which ``logits`` makes the rest; and so for ``recorded``,
                        whatever is asked for
"""

from ...exchange import WHOLE
from ...step import PLAIN, Asked, Drawn, Recorded, Step, arguments
from . import config, launch, logits
from .products import products

DOES = DOES_OF_LOGITS = Asked._fields


def unsupported(step: Step) -> str | None:
    """Why the Triton implementation cannot do a step, or None."""
    if step.logits is not None:
        return logits.unsupported(step)
    if step.asked is not PLAIN and step.shard != WHOLE:
        return f"a shard of a vocabulary with {arguments(step.asked.names())}"
    return config.unsupported(step) or step.too_wide_to_pick()


def run(step: Step) -> Drawn:
    """See ``backends``."""
    if step.logits is not None:
        return logits.run(step)
    if step.asked is PLAIN:
        return launch.run(step)
    return logits.run(_with_logits(step))


def recorded(step: Step) -> Recorded:
    """See ``backends``: three launches, or two where logits are there."""
    step = _with_logits(step)
    assert step.logits is not None
    records = logits.empty_records(len(step.logits), step.logits.device)
    return Recorded(logits.run(step, records=records).ids, step.logits, *records)


def _with_logits(step: Step) -> Step:
    """One launch, unless they are there."""
    if step.logits is not None:
        return step
    return step._replace(logits=products(step.hidden_states, step.weight, step.vocab_size))
