"""vLLM: logits and sampler become one fused step, without a fork; what the step cannot do is left to vLLM, batch by batch.

    pip install "flashsampling[vllm]"
    FLASHSAMPLING_VLLM=auto vllm serve ...  # or require; without it the plug-in does nothing

``register`` is the entry point of the group ``vllm.general_plugins``, which vLLM calls in each of its processes. Nothing is
imported of vLLM there: ``load`` waits until vLLM imports its worker, and looks at the model once it is loaded. ``head`` is what
the model does to its hidden states, ``slots`` what every request asks for, ``step`` the fused step of a batch, and ``runner``
where all of it meets vLLM's model runner. docs/vllm.md has what is fused, what is not, and what it means for seeds.
"""

from ..engine.plugin import Refused
from .load import counters, register

__all__ = ["Refused", "counters", "register"]
