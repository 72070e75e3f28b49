"""FlashSampling: an LM head and its sampler in one exact step, without logits in memory.

Read in this order: ``sampling`` (the functions), ``sampling_params`` (the parameters), ``noise`` (the randomness),
``reference/oracle`` (the contract as plain code), then a backend. Importing this package imports neither Triton nor
CUTLASS.
"""

import sys
from types import ModuleType
from typing import Any, NoReturn

from .outputs import SampleOutput
from .sampler import LMHeadSampler
from .sampling import sample, sample_from_logits
from .scoring import ScoreOutput, score
from .speculative.verification import VerifyOutput, verify, verify_from_logits
from .token_counts import TokenCounts
from .warmup import warmup

__version__ = "0.1.0"
__all__ = [
    "LMHeadSampler",
    "SampleOutput",
    "ScoreOutput",
    "TokenCounts",
    "VerifyOutput",
    "__version__",
    "sample",
    "sample_from_logits",
    "score",
    "verify",
    "verify_from_logits",
    "warmup",
]


class _Package(ModuleType):
    """Raises an error if the package is passed to transformers as ``custom_generate``. transformers silently ignores a
    value that cannot be called; of one that can it reads the signature first."""

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise TypeError(
            f"{self.__name__} is a package and cannot be called; custom_generate must be "
            "flashsampling.integrations.transformers.generate"
        )

    __signature__ = property(__call__)


sys.modules[__name__].__class__ = _Package
