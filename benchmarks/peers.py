"""What we are measured against. Every peer gets its fastest form: temperature 1, so none launches a kernel to divide."""

import importlib.util

import torch
from torch import Tensor

from .timing import Step


def peers(hidden_states: Tensor, weight: Tensor) -> dict[str, Step]:
    """Steps from hidden states (B, D) and weight (V, D) to token ids; "cuBLAS alone" stops at the logits."""
    batch, vocab = hidden_states.shape[0], weight.shape[0]
    logits16 = torch.empty(batch, vocab, dtype=hidden_states.dtype, device=hidden_states.device)

    def multinomial() -> Tensor:
        return torch.multinomial(torch.softmax((hidden_states @ weight.T).float(), dim=-1), 1)

    torch._dynamo.reset()
    steps: dict[str, Step] = {
        "cuBLAS alone": lambda: torch.mm(hidden_states, weight.T, out=logits16),
        "multinomial": torch.compile(multinomial),
    }
    if importlib.util.find_spec("flashinfer") is not None:
        from flashinfer import sampling

        def logits32() -> Tensor:  # FlashInfer samples from fp32: one matmul kernel that writes it, no conversion pass
            return torch.mm(hidden_states, weight.T, out_dtype=torch.float32)

        steps["FI1"] = lambda: sampling.top_k_top_p_sampling_from_logits(logits32(), vocab, 1.0, filter_apply_order="joint")
        steps["FI2"] = lambda: sampling.sampling_from_logits(logits32())
    return steps
