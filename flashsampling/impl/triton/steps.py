"""Which launches a step takes: one, or where a row's logits must be seen more than once, three.

nothing is asked for    ``launch``: logits never leave the registers
logits are there        ``logits``: two launches
anything else           ``products`` writes (B, V) float32 logits, of which ``logits`` makes the rest
"""

from ...exchange import WHOLE
from ...step import PLAIN, Asked, Drawn, Step, arguments
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
    return logits.run(step._replace(logits=products(step.hidden_states, step.weight, step.vocab_size)))
