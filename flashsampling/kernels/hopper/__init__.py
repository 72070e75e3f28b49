"""CuTe DSL, Hopper: the fused step in one launch.

``kernel`` is the kernel, of ``mainloop`` and ``epilogue``, which says what is behind it; ``config`` its shapes and what
it takes; ``cache`` the compiled objects, in memory and on disk; ``launch`` the call, ``params`` that of what a request
asks for.
"""

from .config import choose_config, compiled_for, unsupported
from .dispatch import compiling, recorded, runs_on_shard, shard_logits, shard_winners
from .launch import run

__all__ = [
    "choose_config",
    "compiled_for",
    "compiling",
    "recorded",
    "run",
    "runs_on_shard",
    "shard_logits",
    "shard_winners",
    "unsupported",
]
