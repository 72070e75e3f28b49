"""The CuTe DSL kernel for Hopper: a sampling step in one launch.

``kernel`` holds the device code, built from ``mainloop`` and ``epilogue``. ``config`` lists the tile shapes and the
problems that the kernel takes. ``cache`` compiles and keeps kernels. ``launch`` runs a step with default sampling
parameters, ``dispatch`` all others.
"""

from .config import choose_config, compiled_for, unsupported
from .dispatch import compiling, recorded, runs_on_shard, shard_logits
from .launch import run

__all__ = [
    "choose_config",
    "compiled_for",
    "compiling",
    "recorded",
    "run",
    "runs_on_shard",
    "shard_logits",
    "unsupported",
]
