"""vLLM's engine on a CPU, so that its tests need not cost time on a GPU before they can pass there.

vLLM's model runner for CPUs is its v2, whose kernels are Triton's: here the interpreter runs them. What else vLLM has
compiled for CPUs, and a wheel for GPUs has not, is made of torch operations, and attention is left out: a token's
hidden states are of itself and its position. Scheduler, engine, runner, state and sampler are vLLM's own; its noise,
libdevice's, is torch's. Seen with vLLM 0.26.0 and 0.33.0, unpacked, and 0.26.0's requirements on the path.
"""

import importlib.metadata
import os
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

ASKED_FOR = os.environ.get("FLASHSAMPLING_VLLM_ON_CPU") == "1" and not torch.cuda.is_available()
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "compilation_config": {"mode": 0, "custom_ops": ["none"]},
}


def pretend(patch: Any) -> None:
    """Makes it so, before vLLM is imported; ``patch`` has pytest's ``setattr``. It is not taken back: vLLM stays
    imported."""
    from triton.backends import backends

    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "VLLM_CPU_KVCACHE_SPACE": "1", "TRITON_INTERPRET": "1"}
    os.environ |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "GLOO_SOCKET_IFNAME": "lo"}  # of several ranks
    torch._dynamo.config.disable = (
        True  # with several ranks vLLM compiles its embedding's mask, for minutes or not at all
    )
    version = importlib.metadata.version
    patch.setattr(importlib.metadata, "version", lambda name: version(name) + ("+cpu" if name == "vllm" else ""))
    backends["cpu"] = SimpleNamespace(driver=None)  # type: ignore[assignment] # vLLM asks whether there is one
    library = _operators()
    patch.setattr(torch, "flashsampling_test_library", library, raising=False)  # which lives as long as torch
    import vllm.v1.worker.cpu_worker  # noqa: F401 # it makes events and streams of torch.cuda do nothing
    from vllm import _custom_ops
    from vllm.model_executor.models import qwen3
    from vllm.v1.worker.cpu.model_runner import CPUModelRunner
    from vllm.v1.worker.gpu import model_runner, structured_outputs
    from vllm.v1.worker.gpu.sample import gumbel, sampler, states
    from vllm.v1.worker.gpu.spec_decode import rejection_sampler_utils

    import flashsampling.integrations.vllm.runner as plugin
    from flashsampling.integrations.engine import head as engine_head

    patch.setattr(_custom_ops, "cpu_attn_get_scheduler_metadata", lambda **_: None)
    patch.setattr(qwen3.Qwen3Attention, "forward", _own_value)
    patch.setattr(structured_outputs.StructuredOutputsWorker, "apply_grammar_bitmask", _masked)
    patch.setattr(sampler, "gumbel_sample", _drawn)
    patch.setattr(sampler, "apply_top_k_top_p", below_8_rows)
    patch.setattr(states, "apply_top_k_top_p", below_8_rows)  # where there are drafts
    for module in (gumbel, rejection_sampler_utils):
        patch.setattr(module, "tldevice", SimpleNamespace(log1p=_log1p), raising=False)  # vLLM 0.33's gumbel has none
    # the plug-in takes neither CPUs nor what is faster nowhere; and its class is made of the runner for GPUs
    patch.setattr(model_runner.GPUModelRunner, "warming_up_model", CPUModelRunner.warming_up_model, raising=False)
    patch.setattr(plugin, "check_runner", lambda *_: None)
    patch.setattr(engine_head, "FAST", ("streaming",))


def below_8_rows(
    logits: Tensor, top_k: Tensor | None, top_p: Tensor | None, has_topp_only_rows: bool = False
) -> Tensor:
    """vLLM's ``apply_top_k_top_p`` of so few; 0.26 does not say the last."""
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p_pytorch

    return apply_top_k_top_p_pytorch(logits, top_k, top_p)  # type: ignore[no-any-return]


def _operators() -> torch.library.Library:
    library = torch.library.Library("_C", "FRAGMENT")
    for schema, function in (
        ("init_cpu_memory_env(int[] nodes) -> ()", lambda nodes: None),
        ("cpu_attn_has_isa(str isa) -> bool", lambda isa: False),
        ("silu_and_mul(Tensor! out, Tensor x) -> ()", _silu_and_mul),
        ("rms_norm(Tensor! out, Tensor x, Tensor weight, float epsilon) -> ()", None),  # asked for, not called
        ("fused_add_rms_norm(Tensor! x, Tensor! residual, Tensor weight, float epsilon) -> ()", None),
        ("rotary_embedding(Tensor p, Tensor! q, Tensor!? k, int size, Tensor cache, bool neox) -> ()", None),
    ):
        library.define(schema)
        if function is not None:
            library.impl(schema.partition("(")[0], function, "CompositeExplicitAutograd")
    return library


def _log1p(x: Any) -> Any:
    """Stands in for libdevice's."""
    import triton.language as tl

    return tl.log(1.0 + x)


def _silu_and_mul(out: Tensor, x: Tensor) -> None:
    gate, up = x.chunk(2, dim=-1)
    out.copy_(torch.nn.functional.silu(gate) * up)


def _own_value(self: Any, positions: Tensor, hidden_states: Tensor) -> Tensor:
    """Stands in for attention."""
    logits_gemm, _ = self.qkv_proj(hidden_states)
    value = logits_gemm.split([self.q_size, self.kv_size, self.kv_size], dim=-1)[2]
    place = 0.1 * torch.sin(positions[:, None].float()).to(value.dtype)
    return self.o_proj(value.repeat(1, self.q_size // self.kv_size) + place)[0]  # type: ignore[no-any-return]


def _masked(self: Any, logits: Tensor, input_batch: Any, names: list[str], masks: Any) -> None:
    """Stands in for vLLM's, whose copies want pinned memory."""
    for name, mask in zip(names, masks):
        allowed = torch.from_numpy(mask)[:, None] >> torch.arange(32) & 1
        logits[input_batch.req_ids.index(name)].masked_fill_(allowed.flatten()[: logits.shape[1]] == 0, float("-inf"))


def _drawn(logits: Tensor, slots: Tensor, temperature: Tensor, *_: Any, **__: Any) -> Tensor:
    """Stands in for ``gumbel_sample``, after the temperature."""
    noise = -torch.empty(logits.shape, dtype=torch.float64).exponential_().log()
    noise[temperature[slots] == 0] = 0
    return (logits + noise).argmax(-1)
