"""FlashSampling: the LM head and the sampler as one exact step, with no logits in memory.

Read in this order: ``api`` (the function), ``noise`` (what randomness is), ``reference/oracle`` (the contract as plain code),
then the implementation of your interest. Importing this package imports neither Triton nor CUTLASS.
"""

import sys
from types import ModuleType
from typing import Any, NoReturn

from . import sources  # noqa: F401  reads the sources before any of them is imported
from .sampler import LMHeadSampler
from .sampling import SampleOutput, sample
from .sampling_from_logits import sample_from_logits
from .speculative.verification import VerifyOutput, verify, verify_from_logits
from .token_counts import TokenCounts
from .warmup import warmup

__version__ = "0.1.0"
__all__ = [
    "LMHeadSampler",
    "SampleOutput",
    "TokenCounts",
    "VerifyOutput",
    "__version__",
    "sample",
    "sample_from_logits",
    "verify",
    "verify_from_logits",
    "warmup",
]


class _Package(ModuleType):
    """A package that is given to transformers as ``custom_generate``. transformers ignores one that cannot be called, and
    generates without it; it asks one that can be called for its signature first."""

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise TypeError(
            f"{self.__name__} is a package and cannot be called; custom_generate must be "
            "flashsampling.integrations.transformers.generate"
        )

    __signature__ = property(__call__)


sys.modules[__name__].__class__ = _Package
