"""SGLang's engine, whose scheduler's process looks at every fused step; also on a CPU, so that tests need not cost time
on a GPU before they can pass there, and without the 587 MB of SGLang's own kernels.

Tokenizer manager, scheduler, model runner, cache and sampler are SGLang's own, in its own processes. On a CPU attention
is torch's, and packages of kernels for GPUs are made up (``sglang_made_up``) and not called: without AMX SGLang
computes with torch's operations. With FLASHSAMPLING_SGLANG_STAND_INS=1 SGLang 0.5.15 does so on a GPU too, with
Triton's attention (on a CPU that changes nothing, and was seen to; on a GPU it was not run). Seen with the wheels of
SGLang 0.5.15.post1 and 0.5.23, unpacked, and what ``test_sglang_real`` names, and::

    pip install uvicorn uvloop python-multipart setproctitle partial_json_parser interegular prometheus_client ipython
        \\ watchfiles
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import flashsampling

ON_CPU = os.environ.get("FLASHSAMPLING_SGLANG_ON_CPU") == "1" and not torch.cuda.is_available()
STAND_INS = os.environ.get("FLASHSAMPLING_SGLANG_STAND_INS") == "1"
if ON_CPU or STAND_INS:  # in each process, before SGLang is
    from . import fake_packages  # noqa: F401
SEEN = "FLASHSAMPLING_SGLANG_SEEN"  # the file to which a scheduler's process writes a line for each step
OPTIONS: dict[str, Any] = {
    "device": "cpu", "dtype": "float32", "attention_backend": "torch_native", "sampling_backend": "pytorch",
    "disable_cuda_graph": True,
} if ON_CPU else {"mem_fraction_static": 0.3, "cuda_graph_max_bs_decode": 16}  # fmt: skip
if STAND_INS and not ON_CPU:
    OPTIONS |= {"attention_backend": "triton", "sampling_backend": "pytorch", "disable_prefill_cuda_graph": True}


def engine(folder: str, seen: Path, plugin: str = "require", **options: Any) -> Any:
    """An engine of a model, of which a scheduler writes what it sees to a file."""
    from sglang.srt.entrypoints.engine import Engine

    class Watched(Engine):  # type: ignore[misc] # it is Any where there is no SGLang
        run_scheduler_process_func = staticmethod(run_scheduler)
        run_detokenizer_process_func = staticmethod(run_detokenizer)

    os.environ |= {"FLASHSAMPLING_SGLANG": plugin, SEEN: str(seen)}
    return Watched(model_path=folder, max_running_requests=32, max_total_tokens=4096, **OPTIONS | options)


def run_scheduler(*args: Any, **kwargs: Any) -> Any:
    """Replaces SGLang's ``run_scheduler_process``, in the process that it starts."""
    patch = pytest.MonkeyPatch()  # which is never undone
    if ON_CPU:
        _pretend(patch)
    if STAND_INS:
        stand_in(patch)
    from sglang.srt.managers.scheduler import run_scheduler_process

    _watch(patch, Path(os.environ[SEEN]))
    return run_scheduler_process(*args, **kwargs)


def run_detokenizer(*args: Any, **kwargs: Any) -> Any:
    """Replaces ``run_detokenizer_process``."""
    from sglang.srt.managers.detokenizer_manager import run_detokenizer_process

    return run_detokenizer_process(*args, **kwargs)


def _pretend(patch: pytest.MonkeyPatch) -> None:
    """The plug-in takes neither CPUs nor what is faster nowhere."""
    from flashsampling.integrations.engine import head as engine_head
    from flashsampling.integrations.sglang import runner as plugin

    check_runner = plugin.check_runner

    def check_all_but_the_device(runner: Any, *rest: Any) -> None:
        device, runner.device = runner.device, "cuda"
        try:
            check_runner(runner, *rest)
        finally:
            runner.device = device

    patch.setattr(plugin, "check_runner", check_all_but_the_device)
    patch.setattr(engine_head, "FAST", ("streaming",))


def stand_in(patch: pytest.MonkeyPatch) -> None:
    """Torch's operations, for what the kernels of SGLang 0.5.15 do for a dense model."""
    from sglang.srt.layers.attention import triton_backend
    from sglang.srt.layers.utils.multi_platform import MultiPlatformOp
    from sglang.srt.mem_cache import memory_pool
    from sglang.srt.model_executor import forward_batch_info

    patch.setattr(MultiPlatformOp, "dispatch_forward", lambda self: self.forward_native)
    patch.setattr(memory_pool, "can_use_store_cache", lambda *_: False)
    patch.setattr(triton_backend, "is_arch_support_pdl", lambda: False, raising=False)
    own = forward_batch_info.clamp_position
    for module in [module for name, module in sys.modules.items() if name.startswith("sglang.")]:
        if vars(module).get("clamp_position") is own:
            patch.setattr(module, "clamp_position", forward_batch_info._clamp_position_native)


def _watch(patch: pytest.MonkeyPatch, seen: Path) -> None:
    """Every fused draw against ``flashsampling.sample`` of the row alone, with what its request says; a line for each
    step."""
    from flashsampling.integrations.sglang import request_info
    from flashsampling.integrations.sglang.runner import SglangSampler
    from flashsampling.integrations.sglang.step import SglangStep

    requests: dict[Any, Any] = {}
    parse, draw, sample = request_info.parse_request, SglangStep.draw_tokens, SglangSampler.sample
    drawn: list[dict[str, Any]] = []

    def noted(request: Any, rules: Any) -> Any:
        made = parse(request, rules)
        requests[made] = request
        return made

    def checked(self: Any, batch: Any) -> Any:
        out = draw(self, batch)
        for row, each in enumerate(batch.requests):
            drawn.append(_compared(self.head, batch, row, requests[each], each, out))
        return out

    def counted(self: Any, theirs: Any, *args: Any, **kwargs: Any) -> Any:
        drawn.clear()
        token_ids = sample(self, theirs, *args, **kwargs)
        line = {"drawn": drawn, "rows": len(token_ids), "counters": self.counters()}
        with seen.open("a") as file:
            file.write(json.dumps(line) + "\n")
        return token_ids

    patch.setattr(request_info, "parse_request", noted)
    patch.setattr(SglangStep, "draw_tokens", checked)
    patch.setattr(SglangSampler, "sample", counted)


def _compared(head: Any, batch: Any, row: int, request: Any, noted: Any, out: Any) -> dict[str, Any]:
    """Returns what a row drew, and what is wrong with that."""
    params, vocab_size = request.sampling_params, head.vocab_size
    position, state = int(batch.positions[row]), batch.hidden_states[row : row + 1]
    greedy = params.top_k == 1  # as SGLang has a temperature of 0
    bias = {int(token): value for token, value in (params.logit_bias or {}).items()}
    if position + 1 < len(request.origin_input_ids) + params.min_new_tokens:
        bias |= dict.fromkeys(params.stop_token_ids or (), float("-inf"))
    asked: dict[str, Any] = {} if batch.grammar is None else {"token_mask": batch.grammar[row : row + 1]}
    if bias:
        ids, values = torch.tensor([[*bias]], dtype=torch.int32), torch.tensor([[*bias.values()]])
        asked["logit_bias"] = ids.to(state.device), values.to(state.device)
    if not greedy:
        asked |= {
            "top_k": params.top_k if params.top_k < vocab_size else 0,
            "top_p": params.top_p,
            "min_p": params.min_p,
        }
        asked["joint_top_p"] = not params.min_p  # which no request has beside both
    alone = flashsampling.sample(
        state, head.weight, temperature=0.0 if greedy else params.temperature,
        seed=noted.row.seed if params.sampling_seed is None else params.sampling_seed,
        offset=position, vocab_size=vocab_size,
        **head.transform, **asked,
    )  # fmt: skip
    token, wrong = int(out.token_ids[row]), []
    if token != int(alone.token_ids):
        wrong.append(f"token {token}, alone {int(alone.token_ids)}")
    if params.sampling_seed is not None and noted.row.seed != params.sampling_seed:
        wrong.append(f"seed {noted.row.seed} for {params.sampling_seed}")
    if request.return_logprob and out.logprobs is not None and not bias:
        logits = state.double() @ head.weight[:vocab_size].double().T / (1.0 if greedy else params.temperature)
        difference = abs(float(out.logprobs[row]) - float(logits.log_softmax(-1)[0, token]))
        if not difference < 1e-3:
            wrong.append(f"a log-probability that is {difference} off")
    return {"rid": request.rid, "position": position, "token": token, "wrong": wrong}
