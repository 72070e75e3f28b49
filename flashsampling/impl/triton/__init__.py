"""Triton: the fused step in one launch.

``kernel`` is the kernel, of ``rows``, ``tiles``, ``noise``, ``scores``, ``careful`` and ``exchange``; ``config`` its shapes and
what it takes; ``launch`` the call.
"""

from .config import choose_config, unsupported
from .launch import sample

__all__ = ["choose_config", "sample", "unsupported"]
