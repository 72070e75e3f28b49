"""The peers that we are measured against. No peer pays for a temperature: it is 1, so none launches a kernel to divide.

FI1 and FI2 are what a decode step with FlashInfer does today: 16-bit logits from the LM head, widened, sampled. "FI2
fp32" is the strongest form we could think of: cuBLAS writes the fp32 logits itself.
"""

import importlib.util
from collections.abc import Sequence

import torch
from torch import Tensor

from .timing import Call


def peers(hidden_states: Tensor, weight: Tensor, named: Sequence[str] = ()) -> dict[str, Call]:
    """Returns steps from hidden states (B, D) and weight (V, D) to token ids; "cuBLAS alone" stops at the logits.
    ``named``: the wanted ones; empty: all."""
    batch, vocab = hidden_states.shape[0], weight.shape[0]
    logits16 = torch.empty(batch, vocab, dtype=hidden_states.dtype, device=hidden_states.device)

    def multinomial() -> Tensor:
        return torch.multinomial(torch.softmax((hidden_states @ weight.T).float(), dim=-1), 1)

    torch._dynamo.reset()
    steps: dict[str, Call] = {
        "cuBLAS alone": lambda: torch.mm(hidden_states, weight.T, out=logits16),
        "multinomial": torch.compile(multinomial),
    }
    if importlib.util.find_spec("flashinfer") is not None:
        from flashinfer import sampling

        def logits32() -> Tensor:  # FlashInfer samples from fp32; a model's lm_head gives 16 bits
            return torch.mm(hidden_states, weight.T).float()

        def logits32_at_once() -> Tensor:  # a matmul that writes fp32 itself: no conversion, but no model calls it
            return torch.mm(hidden_states, weight.T, out_dtype=torch.float32)

        steps["FI1"] = lambda: sampling.top_k_top_p_sampling_from_logits(
            logits32(), vocab, 1.0, filter_apply_order="joint"
        )
        steps["FI2"] = lambda: sampling.sampling_from_logits(logits32())
        steps["FI2 fp32"] = lambda: sampling.sampling_from_logits(logits32_at_once())
    return {name: step for name, step in steps.items() if not named or name in named}
