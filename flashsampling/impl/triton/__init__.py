"""Triton: the fused step in one launch.

``kernel`` is the kernel, of ``rows``, ``tiles``, ``noise``, ``scores``, ``careful`` and ``exchange``; ``config`` its shapes and
what it takes; ``launch`` the call.
"""

from .config import choose_config, compiled_for, unsupported
from .launch import run

__all__ = ["choose_config", "compiled_for", "run", "unsupported"]
