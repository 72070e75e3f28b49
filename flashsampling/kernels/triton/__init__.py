"""The Triton kernels: a sampling step in one launch, and steps with sampling parameters in a few more.

``backend`` chooses the launches of a step. The packages:

    fused         one launch for default parameters. ``launch`` calls ``kernel``, which consists of ``row_params``,
                  ``tiles``, ``noise``, ``packed_argmax`` and ``exact_pass``; ``logits_gemm`` stores logits;
                  ``config`` has the tile shapes
    filtered      draws from logits in memory: filters, log-probabilities, transforms
    sharded       the same over several GPUs; ranks agree on cutoffs through ``collectives``
    speculative   drafts: parameters per position, matching, rejection sampling

``jit`` decorates every Triton function of the package.
"""

from .backend import DOES, DOES_OF_LOGITS, recorded, run, unsupported
from .fused.config import choose_config, compiled_for
from .jit import compiling
from .sharded.shard_logits import shard_logits, shard_winners

__all__ = [
    "DOES",
    "DOES_OF_LOGITS",
    "choose_config",
    "compiled_for",
    "compiling",
    "recorded",
    "run",
    "shard_logits",
    "shard_winners",
    "unsupported",
]
