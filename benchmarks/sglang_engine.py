"""SGLang's decode step with and without the plug-in, in turns, on one GPU: ``python -m benchmarks.sglang_engine``.

Two engines, one with the plug-in and one without, each in processes of its own, as SGLang has it. Random weights of a
Qwen3 shape, scaled so that logits spread as real ones do; no network, no tokenizer. Decode steps are CUDA graphs,
prefixes are not kept. Medians over the decode steps of all rows, of all rounds' generations:

    step_ms   on the GPU's clock, from where a step's launches begin to its tokens: model, LM head, sampler
    tpot_ms   time per output token: on the GPU's clock from one step's tokens to the next's
    host_ms   the host's time for the call that launches the step

The plug-in's counters must say that every one of its steps is fused. With FLASHSAMPLING_SGLANG_STAND_INS=1 the model is
torch's operations and Triton's attention (``tests/integrations/sglang/engine.py``), and takes longer than SGLang's own
kernels; head and sampler are SGLang's in one engine and ours in the other all the same.
"""

import itertools
import json
import os
import time
from pathlib import Path
from typing import Annotated, Any

import pytest
import torch
import typer
from rich.console import Console
from rich.table import Table

from tests.integrations.sglang import engine  # in each process before SGLang is: it may make up what that imports

from .random_models import PROMPT, SHAPES, VOCAB, model_folder, spread
from .timing import machine, quartiles, shuffled

SEEN = "FLASHSAMPLING_BENCHMARK_SEEN"  # the file to which a scheduler's process writes a line for every generation
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "top-k top-p": {"top_k": 20, "top_p": 0.95},
    "top-p": {"top_p": 0.9},
    "min-p": {"min_p": 0.05},
}
TIMES = ("step_ms", "tpot_ms", "host_ms")


def run_scheduler(*args: Any, **kwargs: Any) -> Any:
    """In place of SGLang's ``run_scheduler_process``, in the process that it starts."""
    if engine.STAND_INS:
        engine.stand_in(pytest.MonkeyPatch())
    from sglang.srt.managers.scheduler import run_scheduler_process

    _time_steps(Path(os.environ[SEEN]))
    return run_scheduler_process(*args, **kwargs)


def _time_steps(seen: Path) -> None:
    """Notes every decode step; what the last ones took is written where a prompt comes, which is not timed."""
    from sglang.srt.managers.tp_worker import TpModelWorker

    make, step = TpModelWorker.__init__, TpModelWorker.forward_batch_generation
    steps: list[tuple[int, Any, Any, float]] = []

    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        spread(self.model_runner.model, 4.0)

    def timed(self: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        decodes = batch is not None and batch.forward_mode.is_decode()
        if not decodes:
            if steps:
                _write(seen, steps, self.model_runner)
                steps.clear()
            return step(self, batch, *args, **kwargs)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        began = time.perf_counter()
        result = step(self, batch, *args, **kwargs)
        took = 1e3 * (time.perf_counter() - began)
        end.record()
        steps.append((len(batch.reqs), start, end, took))
        return result

    TpModelWorker.__init__, TpModelWorker.forward_batch_generation = made, timed


def _write(seen: Path, steps: list[tuple[int, Any, Any, float]], runner: Any) -> None:
    torch.cuda.synchronize()
    batch = max(rows for rows, *_ in steps)
    full = [(start, end, took) for rows, start, end, took in steps if rows == batch]
    fused = getattr(runner, "flashsampling", None)
    line = {
        "batch": batch,
        "step_ms": [start.elapsed_time(end) for start, end, _ in full],
        "tpot_ms": [one[1].elapsed_time(other[1]) for one, other in itertools.pairwise(full)],
        "host_ms": [took for *_, took in full],
        "counters": None if fused is None else fused.counters(),
    }
    with seen.open("a") as file:
        file.write(json.dumps(line) + "\n")


class Engine:
    """SGLang's, with a file of what its steps took."""

    def __init__(self, folder: str, plugin: str, batches: list[int], attention: str, sampling: str) -> None:
        from sglang.srt.entrypoints.engine import Engine

        class Timed(Engine):  # type: ignore[misc] # it is Any where there is no SGLang
            run_scheduler_process_func = staticmethod(run_scheduler)
            run_detokenizer_process_func = staticmethod(engine.run_detokenizer)

        self._seen = Path(folder, f"{plugin}.jsonl")
        self._seen.touch()
        os.environ |= {"FLASHSAMPLING_SGLANG": plugin, SEEN: str(self._seen)}
        self._engine = Timed(
            model_path=folder,
            load_format="dummy",
            skip_tokenizer_init=True,
            random_seed=0,
            attention_backend=attention,
            sampling_backend=sampling,
            mem_fraction_static=0.3,
            max_running_requests=max(batches),
            max_total_tokens=max(batches) * 256,
            disable_radix_cache=True,  # a repeat must not find an earlier one's prompts
            disable_prefill_cuda_graph=True,
            cuda_graph_bs_decode=sorted(batches),
        )

    def generate(self, prompts: list[list[int]], tokens: int, asked: dict[str, Any]) -> dict[str, Any]:
        """Returns the times of a generation's decode steps."""
        lines = len(self._seen.read_text().splitlines())
        params = {"max_new_tokens": tokens, "ignore_eos": True, "temperature": 1.0, **asked}
        outputs = self._engine.generate(input_ids=prompts, sampling_params=[params] * len(prompts))
        ids = [out["output_ids"] for out in outputs]
        if any(len(row) != tokens or min(row) < 0 or max(row) >= VOCAB for row in ids):
            raise SystemExit(f"{asked}, batch {len(prompts)}: not {tokens} tokens of the vocabulary a row")
        self._engine.generate(input_ids=prompts[:1], sampling_params=[params | {"max_new_tokens": 1}])  # has it written
        made = [json.loads(line) for line in self._seen.read_text().splitlines()[lines:]]
        # before it not all prompts had come; and SGLang begins a step more before it knows that a request has ended
        full = max(made, key=lambda line: len(line["step_ms"]) if line["batch"] == len(prompts) else 0)
        if len(full["step_ms"]) < tokens // 2:
            raise SystemExit(f"batch {len(prompts)}: too few steps of all rows, {[line['batch'] for line in made]}")
        return full  # type: ignore[no-any-return]


def _measured(engines: dict[str, Engine], kind: str, batch: int, tokens: int, rounds: int) -> list[dict[str, Any]]:
    """Rows of both."""
    import numpy as np

    generator = np.random.default_rng(0)

    def timed(who: str) -> dict[str, Any]:
        prompts = generator.integers(0, VOCAB, (batch, PROMPT)).tolist()
        return engines[who].generate(prompts, tokens, KINDS[kind])

    before = {who: timed(who) for who in engines}  # what compiles while it runs has then done so
    generations: dict[str, list[dict[str, Any]]] = {who: [] for who in engines}
    for names in shuffled(engines, rounds):
        for who in names:
            generations[who].append(timed(who))
    first, last = before["require"]["counters"], generations["require"][-1]["counters"]
    if last["fused"] <= first["fused"] or any(last[way] != first[way] for way in ("left", "split")):
        raise SystemExit(f"{kind}, batch {batch}: not every step is fused: {first}, then {last}")
    rows = []
    for who, some in generations.items():
        row: dict[str, Any] = {"kind": kind, "batch": batch, "who": "plugin" if who == "require" else "sglang"}
        for what in TIMES:
            row |= quartiles(what, itertools.chain.from_iterable(each[what] for each in some))
        rows.append(row | {"steps": sum(len(each["step_ms"]) for each in some)})
    return rows


def main(
    shape: Annotated[str, typer.Option(help=f"Of {', '.join(SHAPES)}.")] = "1.7b",
    kinds: Annotated[str, typer.Option(help="Comma-separated.")] = ",".join(KINDS),
    batches: Annotated[str, typer.Option(help="Comma-separated rows.")] = "1,16,64,128,256",
    tokens: Annotated[int, typer.Option(min=8, help="Per request.")] = 64,
    rounds: Annotated[int, typer.Option(min=1, help="Interleaved generations of each.")] = 3,
    attention: Annotated[str, typer.Option(help="SGLang's back end; with stand-ins triton.")] = "triton",
    sampling: Annotated[str, typer.Option(help="SGLang's back end, flashinfer or pytorch.")] = "flashinfer",
    out: Annotated[Path, typer.Option(help="Folder for sglang_SHAPE.json.")] = Path("benchmarks/results"),
) -> None:
    """Times SGLang with and without the plug-in."""
    console, sizes = Console(width=160), [int(batch) for batch in batches.split(",")]
    hidden, depth, heads, mlp, tied = SHAPES[shape]
    engines, ready = {}, {}
    for plugin in ("off", "require"):
        started = time.perf_counter()
        folder = model_folder(hidden, depth, heads, mlp, tied, VOCAB, 8, 128)
        engines[plugin] = Engine(folder, plugin, sizes, attention, sampling)
        ready[plugin] = round(time.perf_counter() - started, 1)
    console.print(f"engines ready after {ready} s")
    result: dict[str, Any] = {
        "shape": shape,
        "tokens": tokens,
        "rounds": rounds,
        "startup_s": ready,
        "attention": attention,
    }
    result |= {"sampling": sampling, "stand_ins": os.environ.get("FLASHSAMPLING_SGLANG_STAND_INS") == "1"}
    result |= {"machine": machine(), "rows": []}
    out.mkdir(parents=True, exist_ok=True)
    for kind in kinds.split(","):
        table = Table("B", *(f"{what}: SGLang, fused, ratio" for what in TIMES), title=kind)
        for batch in sizes:
            theirs, ours = _measured(engines, kind, batch, tokens, rounds)
            cells = [f"{theirs[what]:.3f}, {ours[what]:.3f}, {ours[what] / theirs[what]:.2f}" for what in TIMES]
            table.add_row(str(batch), *cells)
            result["rows"] += [theirs, ours]
            (out / f"sglang_{shape}.json").write_text(json.dumps(result, indent=1) + "\n")
        console.print(table)
    console.print(result["machine"])
    os._exit(0)  # an engine that is shut down kills all of this process's children, the other among them


if __name__ == "__main__":
    typer.run(main)
