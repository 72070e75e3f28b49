"""How long the first call of a mix of sampling parameters takes: ``python -m benchmarks.first_call``.

Every mix runs in a process of its own with empty caches. Imports, tensors and the CUDA context are made before; the
first call ends when the device is synchronised. It includes what Triton builds once per host with gcc, its launchers.
Then the same mix is called with other vocabularies, other batches, and tensors of a value per row instead of numbers
("rows"; the mix ``filters_per_row`` with numbers instead of tensors). The last should compile nothing.

``--compile-only 90`` needs no GPU: it compiles for that architecture the Triton kernels of ``sample_from_logits``, and
counts those that the other calls would compile, without compiling them. Its launches do not overlap (PDL), so a kernel
lacks these few instructions.
"""

import functools
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor

from flashsampling import TokenCounts, sample, sample_from_logits
from flashsampling.backends import BACKENDS
from flashsampling.inputs import SampleInputs
from flashsampling.param_parsers import BatchShape
from flashsampling.sampling_params import parse_sampling_params

from .timing import Call, machine, versions

ROOT = Path(__file__).parents[1]
CALLS = {  # name -> backend, dtype
    "sample triton": ("triton", torch.bfloat16),
    "sample cute": ("cute", torch.bfloat16),
    "logits float32": ("triton", torch.float32),
    "logits bfloat16": ("triton", torch.bfloat16),
}
# as in ``from_logits``, whose import of tests would switch Triton's interpreter on where there is no GPU
TOP_K, TOP_P, MIN_P = 50, 0.9, 0.05
FILTERS = {"top_k": TOP_K, "top_p": TOP_P, "min_p": MIN_P}
PENALTIES = {"repetition_penalty": 1.1, "frequency_penalty": 0.1, "presence_penalty": 0.1}
TENSORS: dict[str, Callable[[int, int, torch.device], Any]] = {  # of a batch, a vocabulary's size and a device
    "bias": lambda batch, vocab, device: torch.ones(vocab, device=device),
    "logit_bias": lambda batch, vocab, device: (
        torch.arange(32, device=device).repeat(batch, 1),
        torch.ones(batch, 32, device=device),
    ),
    "token_counts": TokenCounts,
    "token_mask": lambda batch, vocab, device: torch.full(
        (batch, -(-vocab // 32)), -1, dtype=torch.int32, device=device
    ),
    "logprob_ids": lambda batch, vocab, device: torch.arange(7, device=device).repeat(batch, 1),
}
LOGPROBS = {"return_logprobs": True, "top_logprobs": 5}
PROCESSED = {**PENALTIES, **{name: TENSORS[name] for name in ("token_counts", "token_mask", "logit_bias")}}
MIXES: dict[str, dict[str, Any]] = {  # arguments of ``sample``, or what makes them
    "plain": {},
    "top_k": {"top_k": TOP_K},
    "top_p": {"top_p": TOP_P},
    "min_p": {"min_p": MIN_P},
    "filters": FILTERS,
    "filters_per_row": FILTERS,
    "logprobs": {"return_logprobs": True},
    "top_logprobs": LOGPROBS,
    "processed_top_p": {**PROCESSED, "top_p": TOP_P},
    "everything": {
        **{**PROCESSED, **FILTERS, **LOGPROBS, "return_logsumexp": True, "logit_scale": 0.5, "soft_cap": 30.0},
        **{name: TENSORS[name] for name in ("bias", "logprob_ids")},
    },
}
WORKER = "from benchmarks.first_call import work; work()"  # its argument is a case


class Case(NamedTuple):
    """What a process measures."""

    call: str
    mix: str
    vocabs: list[int]  # the first call's, then others
    batches: list[int]
    dim: int
    capability: int | None  # to compile for; None: calls on a GPU

    def variations(self) -> Iterator[tuple[str, int, int, bool]]:
        """Yields name, batch, vocabulary and whether parameters are tensors, for every call."""
        (vocab, *vocabs), (batch, *batches), rows = self.vocabs, self.batches, self.mix.endswith("per_row")
        yield "first", batch, vocab, rows
        yield from ((f"V={other}", batch, other, rows) for other in vocabs)
        yield from ((f"B={other}", other, vocab, rows) for other in batches)
        yield "rows", batch, vocab, not rows


def arguments(mix: str, batch: int, vocab: int, device: torch.device, rows: bool) -> dict[str, Any]:
    """Returns temperature, seed, offset and a mix, as ``sample`` takes them. ``rows``: a tensor for every parameter
    that may have a value per row."""

    def value(name: str, given: Any) -> Any:
        if callable(given):
            return given(batch, vocab, device)
        if rows and name in ("temperature", "offset", *FILTERS, *PENALTIES):
            dtype = torch.int64 if isinstance(given, int) else torch.float32
            return torch.full((batch,), given, dtype=dtype, device=device)
        return given

    given = {"temperature": 0.8, "offset": 0, **MIXES[mix]}
    return {name: value(name, x) for name, x in given.items()} | {"seed": torch.arange(batch, device=device)}


def inputs(values: Tensor, weight: Tensor | None, options: dict[str, Any]) -> SampleInputs:
    """Returns a call as backends take it. ``values``: hidden states, or logits if there is no weight."""
    rest = dict(options)
    temperature, seed, offset = (rest.pop(name) for name in ("temperature", "seed", "offset"))
    batch, vocab = len(values), values.shape[1] if weight is None else len(weight)
    params = parse_sampling_params(rest, BatchShape(batch, vocab, vocab, values.device, 1))
    logits = values if weight is None else None
    head = values if weight is None else weight
    return SampleInputs(values, head, temperature, seed, offset, 1, vocab, params=params, logits=logits)


class Kernels:
    """Notes what Triton, and the CuTe DSL if it is used, compile in this process."""

    def __init__(self, impl: str) -> None:
        import triton

        self.found: list[dict[str, Any]] = []
        triton.knobs.compilation.listener = self._listen
        if impl == "cute":
            from cutlass import cute

            compile_launch = cute.compile

            def timed(*arguments: Any, **options: Any) -> Any:
                started = time.perf_counter()
                compiled = compile_launch(*arguments, **options)
                self.found.append({"seconds": time.perf_counter() - started, "name": type(arguments[0]).__name__})
                return compiled

            cute.compile = timed

    def _listen(self, *, src: Any, metadata: Any, metadata_group: dict[str, str], times: Any, cache_hit: bool) -> None:
        if not cache_hit:
            stages = {"ir": times.ir_initialization, **dict(times.lowering_stages)}
            ptx = next((path for name, path in metadata_group.items() if name.endswith(".ptx")), None)
            seconds = {name: us / 1e6 for name, us in stages.items()}
            self.found.append({"name": src.name, "seconds": times.total / 1e6, "stages": seconds, "ptx": ptx})

    def take(self) -> list[dict[str, Any]]:
        """Returns the kernels since the last time."""
        taken, self.found = self.found, []
        for kernel in taken:
            ptx = kernel.pop("ptx", None)
            if ptx is not None:
                kernel["ptx_lines"] = len(Path(ptx).read_text().splitlines())
        return taken


def _cpu_seconds() -> float:
    """Returns the processor seconds of this process and of the compilers that it started."""
    return sum(os.times()[:4])


def _timed(call: Call, kernels: Kernels) -> dict[str, Any]:
    before, started = _cpu_seconds(), time.perf_counter()
    call()
    seconds, cpu_seconds = time.perf_counter() - started, _cpu_seconds() - before
    return {"seconds": seconds, "cpu_seconds": cpu_seconds, "kernels": kernels.take()}


def _on_gpu(case: Case) -> dict[str, Any]:
    """Calls the public functions."""
    (impl, dtype), device = CALLS[case.call], torch.device("cuda", 0)
    calls: dict[str, Call] = {}
    weight = torch.randn(max(case.vocabs), case.dim, device=device, dtype=dtype)
    for name, batch, vocab, rows in case.variations():
        options = arguments(case.mix, batch, vocab, device, rows)
        if case.call.startswith("logits"):
            values, head = 3 * torch.randn(batch, vocab, device=device).to(dtype), None
        else:
            values, head = torch.randn(batch, case.dim, device=device, dtype=dtype), weight[:vocab]
        reason = BACKENDS[impl].unsupported(inputs(values, head, options))  # imports the backend
        if reason is not None:
            return {"unsupported": reason}

        def call(values: Tensor = values, head: Tensor | None = head, options: dict[str, Any] = options) -> None:
            if head is None:
                sample_from_logits(values, impl=impl, **options)
            else:
                sample(values, head, impl=impl, **options)
            torch.cuda.synchronize()

        calls[name] = call
    BACKENDS["triton"].module  # noqa: B018, an import: the Hopper kernel's filtered steps need it too
    kernels = Kernels(impl)
    torch.cuda.synchronize()
    return {name: _timed(call, kernels) for name, call in calls.items()}


def _without_gpu(case: Case) -> dict[str, Any]:
    """Compiles the kernels of the first call, and counts those that the other calls lack."""
    assert case.capability is not None
    import triton

    from flashsampling.kernels.triton.filtered import dispatch
    from tests.kernels.triton.target import compile_only

    _, dtype = CALLS[case.call]
    compile_only(case.capability)
    kernels, found, device = Kernels("triton"), dict[str, Any](), torch.device("cpu")
    for name, batch, vocab, rows in case.variations():
        logits = torch.zeros(batch, vocab, dtype=dtype)
        step = inputs(logits, None, arguments(case.mix, batch, vocab, device, rows))
        if name == "first":
            found[name] = _timed(functools.partial(dispatch.run, step), kernels)
            continue
        missing: dict[Any, str] = {}

        def skip(*, key: Any, fn: Any, missing: dict[Any, str] = missing, **rest: Any) -> bool:
            missing[fn.name, str(key)] = fn.name
            return True  # Triton then compiles nothing

        triton.knobs.runtime.jit_cache_hook = skip
        dispatch.run(step)
        found[name] = {"kernels": [{"name": kernel.rpartition(".")[2]} for kernel in missing.values()]}
    return found


def work() -> None:
    """Prints the result of the case that is this process's argument."""
    case = Case(**json.loads(sys.argv[1]))
    print("\n" + json.dumps(_on_gpu(case) if case.capability is None else _without_gpu(case)))


def measure(case: Case) -> dict[str, Any]:
    """Runs a case in a fresh process with empty caches. Returns what it found for every call, by name; or why the
    backend cannot run it.

    Raises:
        RuntimeError: the process failed.
    """
    with tempfile.TemporaryDirectory(prefix="first-call-") as folder:
        caches = {f"{whose}_CACHE_DIR": f"{folder}/{whose}" for whose in ("TRITON", "FLASHSAMPLING", "CUTE_DSL")}
        environment = os.environ | caches | {"TRITON_INTERPRET": "0"}
        command = [sys.executable, "-c", WORKER, json.dumps(case._asdict())]
        run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    if run.returncode != 0:
        raise RuntimeError(f"{case.call}, {case.mix}: {run.stderr[-3000:]}")
    found: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return found


def _host(capability: int | None) -> dict[str, Any]:
    """Returns machine and versions, the host's processor, how many of its cores this process has, and how many were
    busy."""
    information = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    names = [line.partition(":")[2].strip() for line in information.splitlines() if line.startswith("model name")]
    host = {"cpu": names[0] if names else platform.machine(), "cpu_cores": len(os.sched_getaffinity(0))}
    where = machine() if capability is None else {"compiled_for": f"sm_{capability}", **versions()}
    return {**where, **host, "load": round(os.getloadavg()[0], 1)}


def _cell(found: dict[str, Any]) -> str:
    """Returns the seconds, if the call was made, and the number of new kernels."""
    seconds = f"{found['seconds']:.2f} s, " if "seconds" in found else ""
    return f"{seconds}{len(found['kernels'])} new"


def _kernel(kernel: dict[str, Any]) -> str:
    lines = f", {kernel['ptx_lines']} lines of PTX" if "ptx_lines" in kernel else ""
    return f"{kernel['name']} {kernel['seconds']:.2f} s{lines}"


def _chosen(option: str, given: list[str], known: dict[str, Any]) -> list[str]:
    unknown = [name for name in given if name not in known]
    if unknown:
        raise typer.BadParameter(f"{unknown[0]!r} is none of: {', '.join(known)}", param_hint=option)
    return given or list(known)


def main(
    mix: Annotated[list[str] | None, typer.Option(help=f"Of {', '.join(MIXES)}. Repeatable; default: all.")] = None,
    call: Annotated[list[str] | None, typer.Option(help=f"Of {', '.join(CALLS)}. Repeatable; default: all.")] = None,
    vocabs: Annotated[str, typer.Option(help="Comma-separated: the first call's, then others.")] = "151936,128256",
    batches: Annotated[str, typer.Option(help="Comma-separated: the first call's, then others.")] = "16,5,1",
    dim: Annotated[int, typer.Option(help="Columns of the LM head.")] = 4096,
    compile_only: Annotated[
        int | None, typer.Option(help="Compile for this capability, such as 90, and call nothing: no GPU needed.")
    ] = None,
    threads: Annotated[int, typer.Option(min=1, help="Processes at once, with --compile-only.")] = 1,
    out: Annotated[Path | None, typer.Option("--json", help="File for the results.")] = None,
) -> None:
    """Times first calls, and counts what other calls compile."""
    calls, mixes = _chosen("--call", call or [], CALLS), _chosen("--mix", mix or [], MIXES)
    if compile_only is None and not torch.cuda.is_available():
        raise typer.BadParameter("this benchmark needs a CUDA device, or --compile-only")
    if compile_only is None and threads > 1:
        raise typer.BadParameter("calls on a GPU are timed one by one", param_hint="--threads")
    if compile_only is not None:
        calls = [name for name in calls if name.startswith("logits")]
        if not calls:
            raise typer.BadParameter("only logits can be compiled for without a GPU", param_hint="--call")
    sizes = [int(size) for size in vocabs.split(",")], [int(size) for size in batches.split(",")]
    console = Console(width=200)
    result: dict[str, Any] = {"machine": _host(compile_only), "vocabs": sizes[0], "batches": sizes[1], "rows": []}
    cases = [Case(each, name, *sizes, dim, compile_only) for each in calls for name in mixes]
    with ThreadPoolExecutor(threads) as pool:
        for case, found in zip(cases, pool.map(measure, cases)):
            result["rows"].append({"call": case.call, "mix": case.mix, "found": found})
            console.print(f"{case.call}, {case.mix}: {found.get('unsupported') or _cell(found['first'])}")
            if out is not None:  # a run that is cut short keeps what it has
                out.write_text(json.dumps(result, indent=1) + "\n")
    others = [name for name, *_ in cases[0].variations()][1:]
    for each in calls:
        table = Table(
            "mix", "first call, s", "CPU, s", "kernels", *others, title=f"{each}, V={sizes[0][0]} B={sizes[1][0]}"
        )
        for row in result["rows"]:
            found = row["found"]
            if row["call"] != each or "unsupported" in found:
                continue
            first = found["first"]
            named = "\n".join(map(_kernel, first["kernels"]))
            times = f"{first['seconds']:.2f}", f"{first['cpu_seconds']:.2f}"
            table.add_row(row["mix"], *times, named, *(_cell(found[name]) for name in others))
        console.print(table)
    console.print(result["machine"])


if __name__ == "__main__":
    typer.run(main)
