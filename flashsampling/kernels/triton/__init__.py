"""The Triton backend: the fused step in one launch; a step with other sampling parameters takes two more.

``backend`` chooses the launches of a step. ``fused.launch`` launches ``fused.kernel``, which is built from
``fused.row_params``, ``fused.tiles``, ``fused.noise``, ``fused.packed_argmax`` and ``fused.exact_pass``.
``fused.logits_gemm`` computes the same tiles and writes the logits to memory; ``filtered`` draws from logits in memory.
``speculative`` verifies chains of drafts. ``sharded`` exchanges winners, logits and results between ranks.
``fused.config`` holds the tile shapes and the supported problems. ``jit`` is the decorator of every Triton
function of this package.
"""

from .backend import recorded, run, shard_logits, unsupported
from .fused.config import choose_config, compiled_for
from .jit import compiling

__all__ = [
    "choose_config",
    "compiled_for",
    "compiling",
    "recorded",
    "run",
    "shard_logits",
    "unsupported",
]
