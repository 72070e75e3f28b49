"""Triton: the fused step in one launch. ``kernel`` is the kernel and its launch, ``noise`` its noise, ``config`` its shapes."""

from .config import choose_config, unsupported
from .kernel import sample

__all__ = ["choose_config", "sample", "unsupported"]
