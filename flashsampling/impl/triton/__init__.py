"""Triton: the fused step in one launch. ``kernel`` is the kernel and its launch, ``noise`` its noise, ``config`` its shapes."""

from .config import choose_config, compiled_for, unsupported
from .kernel import run

__all__ = ["choose_config", "compiled_for", "run", "unsupported"]
