"""Hugging Face transformers: ``model.generate(..., custom_generate=generate)`` with the LM head fused into the sampler.

    from flashsampling.integrations.transformers import generate

    model.generate(**inputs, custom_generate=generate, do_sample=True, top_p=0.9, seed=[1, 2, 3])

``decoding`` is transformers' own ``custom_generate`` contract: KV cache, padding and stopping criteria come from there. It runs
the model as it is, and ``head`` takes from it what its LM head would have multiplied, and finds what it makes of the logits.
``assisted`` is the same with drafts. ``patching`` makes every later ``model.generate`` ours, whoever calls it. ``arguments`` is
what every argument of ``generate`` does here, ``processors`` what a ``GenerationConfig`` and logits processors become;
docs/transformers.md has that as a table, and which models work.
"""

import sys

from ... import _Package
from .decoding import GenerateOutput, generate
from .errors import NoTokenError
from .head import CheckedHead, checked_lm_head
from .patching import patch, unpatch

__all__ = ["CheckedHead", "GenerateOutput", "NoTokenError", "checked_lm_head", "generate", "patch", "unpatch"]
sys.modules[__name__].__class__ = _Package
