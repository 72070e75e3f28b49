"""FlashSampling: the LM head and the sampler as one exact step, with no logits in memory.

Read in this order: ``api`` (the function), ``noise`` (what randomness is), ``impl/reference`` (the contract as plain code),
then the implementation of your interest. Importing this package imports neither Triton nor CUTLASS.
"""

from . import sources  # noqa: F401  reads the sources before any of them is imported
from .api import SampleOutput, sample
from .counts import TokenCounts
from .logits import sample_from_logits
from .module import LMHeadSampler
from .verification import VerifyOutput, verify, verify_from_logits
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
