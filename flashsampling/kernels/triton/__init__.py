"""Triton: the fused step in one launch, and what a request asks for beside it in two more.

``steps`` says which launches a step takes. ``launch`` calls ``kernel``, which is made of ``rows``, ``tiles``,
``noise``, ``scores``, ``careful`` and ``exchange``; ``logits_gemm`` has its tiles without its end; ``logits`` draws
from logits in memory. ``shards`` has the logits of a shard in memory, and draws from what the ranks keep of them, who
meet by ``rounds``; what comes before, between and behind is in ``hashes``, ``limits`` and ``parts``. ``config`` has the
tiles' shapes, and what is taken; ``jit`` is the decorator of all of Triton's functions here.
"""

from .backend import recorded, run, unsupported
from .fused.config import choose_config, compiled_for
from .jit import compiling
from .sharded.shard_logits import shard_logits, shard_winners

__all__ = [
    "choose_config",
    "compiled_for",
    "compiling",
    "recorded",
    "run",
    "shard_logits",
    "shard_winners",
    "unsupported",
]
