"""vLLM's decode step with and without the plug-in, interleaved, in one engine: ``python -m benchmarks.vllm_engine``.

Random weights of a Qwen3 shape, scaled so that logits spread as real ones do; no network, no tokenizer. The engine is
in a process of its own, as vLLM has it; the model runner's class there is the plug-in's or vLLM's own, in turns.

    sample_ms   GPU time of LM head and sampler, CUDA events around the runner's ``sample``
    forward_ms  likewise of the model before it
    host_ms     the host's time for that call, in which it launches and does not wait
    tpot_ms     time per output token, scheduler and model included: on the GPU's clock from one step's tokens to the
                next's; the caller's clock is not used, because outputs queue up while it adds requests
    peak_MiB    most memory allocated in a short generation that is not timed; sample_MiB: by LM head and sampler in one
                step, the last positions of the prompts among them

Times are medians over the decode steps of all rows, of all rounds' generations, the plug-in's and vLLM's in turns. The
plug-in's counters must say that every one of its steps is fused; with ``--ranks``, all ranks must have drawn the same
tokens. With ``FLASHSAMPLING_VLLM_GRAPHS=0`` the plug-in's steps are launched, and no CUDA graphs.
"""

import itertools
import json
import os
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from .random_models import PROMPT, SHAPES, VOCAB, model_folder
from .timing import machine, quartiles, shuffled

SETTINGS = {  # no network, no FlashInfer; functions may be sent to the engine
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
    "FLASHSAMPLING_VLLM": "require",
    # torch's inductor gives the process a folder of its own, where kernels that were compiled before are not found
    "TRITON_CACHE_DIR": str(Path.home() / ".triton" / "cache"),
}
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "seeded": {"seed": 1},
    "top-k top-p": {"top_k": 20, "top_p": 0.95},
    "min-p penalties": {"min_p": 0.05, "repetition_penalty": 1.1, "frequency_penalty": 0.1, "presence_penalty": 0.1},
    "logprobs=5": {"logprobs": 5},
    "grammar mask": {},
}


class Engine:
    """vLLM with a model of random weights."""

    def __init__(self, folder: str, **options: Any) -> None:
        for name, value in SETTINGS.items():
            os.environ.setdefault(name, value)
        from vllm import LLM, SamplingParams

        self.params = SamplingParams
        self.llm = LLM(
            model=folder,
            load_format="dummy",
            skip_tokenizer_init=True,
            worker_extension_cls="benchmarks.vllm_worker.WorkerExtension",
            **options,
        )

    def tell(self, function: Any, *args: Any) -> Any:
        """Has every worker call a function with itself; what the first returns."""
        return self.llm.collective_rpc(function, args=args)[0]

    def generate(self, prompts: list[list[int]], params: list[Any]) -> list[Any]:
        """One output per prompt."""
        outputs = self.llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        return [output.outputs[0] for output in outputs]


def _measured(engine: Engine, kind: str, batch: int, tokens: int, rounds: int) -> list[dict[str, Any]]:
    """Rows of both."""
    import numpy as np

    from flashsampling.integrations.vllm import counters

    from .vllm_worker import start_timing, stop_timing, use_plugin

    generator = np.random.default_rng(0)

    def timed(who: str, count: int, with_memory: bool = False) -> dict[str, Any]:
        """One generation: what its steps took."""
        prompts = generator.integers(0, VOCAB, (batch, PROMPT)).tolist()
        params = []
        for row in range(batch):
            asked = KINDS[kind] | ({"seed": row} if "seed" in KINDS[kind] else {})
            params.append(engine.params(max_tokens=count, ignore_eos=True, detokenize=False, **asked))
        engine.tell(use_plugin, who == "plugin")
        engine.tell(start_timing, kind == "grammar mask", with_memory)
        before = engine.tell(counters)
        ids = [list(output.token_ids) for output in engine.generate(prompts, params)]
        after = engine.tell(counters)
        if any(len(row) != count or min(row) < 0 or max(row) >= VOCAB for row in ids):
            raise SystemExit(f"{kind}, batch {batch}: not {count} tokens of the vocabulary a row")
        all_fused = after["fused"] > before["fused"] and all(after[way] == before[way] for way in ("left", "split"))
        if who == "plugin" and not all_fused:
            raise SystemExit(f"{kind}, batch {batch}: not every step is fused: {before}, then {after}")
        of_ranks: list[dict[str, Any]] = engine.llm.collective_rpc(stop_timing, args=(batch,))
        if any(each["drawn"] != of_ranks[0]["drawn"] for each in of_ranks):
            raise SystemExit(f"{kind}, batch {batch}, {who}: the ranks did not draw the same tokens")
        return of_ranks[0]

    generations: dict[str, list[dict[str, Any]]] = {"vllm": [], "plugin": []}
    memory = {
        who: timed(who, 4, with_memory=True) for who in generations
    }  # what compiles while it runs has then done so
    for names in shuffled(generations, rounds):
        for who in names:
            generations[who].append(timed(who, tokens))
    rows = []
    for who, some in generations.items():
        row: dict[str, Any] = {"kind": kind, "batch": batch, "who": who}
        for what in ("forward_ms", "sample_ms", "host_ms", "tpot_ms"):
            row |= quartiles(what, itertools.chain.from_iterable(each[what] for each in some))
        row |= {what: memory[who][what] for what in ("peak_MiB", "sample_MiB")}
        rows.append(row | {"steps": sum(len(each["sample_ms"]) for each in some)})
    return rows


def main(
    shape: Annotated[str, typer.Option(help=f"Of {', '.join(SHAPES)}.")] = "1.7b",
    layers: Annotated[int, typer.Option(help="Fewer layers than the shape has; 0: as many.")] = 0,
    kinds: Annotated[str, typer.Option(help="Comma-separated.")] = ",".join(KINDS),
    batches: Annotated[str, typer.Option(help="Comma-separated rows.")] = "1,16,64,128,256",
    tokens: Annotated[int, typer.Option(min=8, help="Per request.")] = 64,
    rounds: Annotated[int, typer.Option(min=1, help="Interleaved generations of each.")] = 5,
    ranks: Annotated[int, typer.Option(help="GPUs that share the model (tensor parallelism).")] = 1,
    attention: Annotated[
        str, typer.Option(help="vLLM's back end; FLASH_ATTN is its own choice on an H200.")
    ] = "FLASH_ATTN",
    out: Annotated[
        Path, typer.Option(help="Folder for vllm_SHAPE.json; with several ranks vllm_SHAPE_tpN.json.")
    ] = Path("benchmarks/results"),
) -> None:
    """Times vLLM with and without the plug-in."""
    from .vllm_worker import spread_logits

    console = Console(width=200)
    sizes = [int(batch) for batch in batches.split(",")]
    hidden, depth, heads, mlp, tied = SHAPES[shape]
    started = time.perf_counter()
    if ranks > 1:
        os.environ.setdefault("FLASHSAMPLING_VLLM_TP", "1")
    engine = Engine(
        model_folder(hidden, layers or depth, heads, mlp, tied, VOCAB, 8, 128),
        max_model_len=1024,
        max_num_seqs=max(sizes),
        gpu_memory_utilization=0.5,
        enable_prefix_caching=False,  # a repeat must not find an earlier one's prompts
        attention_backend=attention,
        # without torch.compile, whose graphs are pieces; with no graph at all the host is so late that it is timed, not
        # the GPU
        compilation_config={"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": sorted(sizes)},
        tensor_parallel_size=ranks,
        disable_custom_all_reduce=True,
    )
    startup = time.perf_counter() - started
    engine.tell(spread_logits, 4.0)
    from flashsampling.integrations.vllm import counters
    from flashsampling.integrations.vllm.settings import graphs

    result: dict[str, Any] = {
        "shape": shape,
        "ranks": ranks,
        "layers": layers or depth,
        "tokens": tokens,
        "rounds": rounds,
    }
    result |= {
        "startup_s": round(startup, 1),
        "attention": attention,
        "graphs": graphs(),
        "machine": machine(),
        "rows": [],
    }
    console.print(f"engine ready after {startup:.0f} s; {engine.tell(counters)}")
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"vllm_{shape}{f'_tp{ranks}' if ranks > 1 else ''}.json"
    for kind in kinds.split(","):
        table = Table(
            "B",
            "head + sampler: vLLM, ms",
            "fused, ms",
            "ratio",
            "token: vLLM, ms",
            "fused, ms",
            "ratio",
            "MiB",
            title=kind,
        )
        for batch in sizes:
            rows = _measured(engine, kind, batch, tokens, rounds)
            theirs, ours = rows
            cells = [
                f"{theirs['sample_ms']:.3f}",
                f"{ours['sample_ms']:.3f}",
                f"{ours['sample_ms'] / theirs['sample_ms']:.2f}",
            ]
            cells += [
                f"{theirs['tpot_ms']:.3f}",
                f"{ours['tpot_ms']:.3f}",
                f"{ours['tpot_ms'] / theirs['tpot_ms']:.2f}",
            ]
            table.add_row(str(batch), *cells, f"{theirs['sample_MiB']:.0f} / {ours['sample_MiB']:.0f}")
            result["rows"] += rows
            path.write_text(json.dumps(result | {"counters": engine.tell(counters)}, indent=1) + "\n")
        console.print(table)
    of_ranks = engine.llm.collective_rpc(counters)
    if any(each != of_ranks[0] for each in of_ranks):
        raise SystemExit(f"the ranks did not do the same: {of_ranks}")
    result |= {"counters": of_ranks[0]}
    path.write_text(json.dumps(result, indent=1) + "\n")
    console.print(result["machine"], result["counters"])


if __name__ == "__main__":
    typer.run(main)
