"""vLLM: LM head and sampler become one fused step, without a fork. What the step cannot do is left to vLLM, batch by
batch.

    pip install "flashsampling[vllm]"
    FLASHSAMPLING_VLLM=auto vllm serve ...  # or require; without it the plug-in does nothing

``register`` is the entry point of the group ``vllm.general_plugins``, which vLLM calls in each of its processes.
``load`` inspects the model once a worker has loaded it, ``head`` finds the LM head, ``request_info`` reads requests,
``step`` vLLM's state, ``batches`` its batches, and ``runner`` is where all of it meets vLLM's model runner. What SGLang
shares is in ``integrations/engine``: ``engine.step`` keeps a batch's parameters from step to step. docs/vllm.md has
what is fused, what is not, and what that means for seeds.
"""

from ..engine.plugin import Refused
from .load import counters, register

__all__ = ["Refused", "counters", "register"]
