"""Hugging Face transformers: ``model.generate(..., custom_generate=generate)`` with the LM head fused into the sampler.

    from flashsampling.integrations.transformers import generate

    model.generate(**inputs, custom_generate=generate, do_sample=True, top_p=0.9, seed=[1, 2, 3])

``decoding`` follows transformers' ``custom_generate`` contract: KV cache, padding and stopping criteria are
transformers'. It runs the model unchanged. ``head`` takes the LM head's input from the model and detects how the model
changes its logits. ``assisted`` decodes with drafts. ``patching`` replaces ``model.generate`` for all callers.
``arguments`` checks the arguments of ``generate``. ``processors`` and ``processor_params`` map a ``GenerationConfig``
and logits processors to sampling parameters. docs/transformers.md has tables of both, and of the models that work.
"""

import sys

from ... import _Package
from .decoding import GenerateOutput, generate
from .errors import NoTokenError
from .head import CheckedHead, checked_lm_head
from .patching import patch, unpatch

__all__ = ["CheckedHead", "GenerateOutput", "NoTokenError", "checked_lm_head", "generate", "patch", "unpatch"]
sys.modules[__name__].__class__ = _Package
