"""SGLang: LM head and sampler become one fused step, without a fork. What the step cannot do is left to SGLang, batch
by batch.

    pip install flashsampling  # beside SGLang
    FLASHSAMPLING_SGLANG=auto python -m sglang.launch_server ...  # or require; without it the plug-in does nothing

``register`` is the entry point of the group ``sglang.srt.plugins``, which SGLang calls in each of its processes. It
hooks a few functions; all else is changed on one model runner, once its model is loaded, and only if it can be fused.
``load`` has the hooks, ``head`` finds the LM head, ``request_info`` and ``step`` read requests, and ``runner`` is where
all of it meets SGLang's model runner. docs/sglang.md has what is fused and what is not.
"""

from ..engine.plugin import Refused
from .load import counters, register

__all__ = ["Refused", "counters", "register"]
