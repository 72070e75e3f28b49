"""Fills the tables of README.md and docs/ from benchmarks/results, and draws their plots: ``python -m
benchmarks.tables``. ``tests/project/test_docs.py`` checks that the pages equal the results. No GPU is needed."""

import functools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import typer

Result = Mapping[str, Any]  # what a benchmark wrote
Cell = tuple[int, dict[str, Any], dict[str, Any]]  # batch size, the engine's own row, the plug-in's row

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
FLASHINFER = ("FI1", "FI2", "FI2 fp32")  # the steps of ``benchmarks.sample`` that use FlashInfer
README_CELLS = {  # LM head and batch size -> a model that has this head
    ("V=151936 D=4096", 1): "Qwen3 8B",
    ("V=151936 D=4096", 64): "Qwen3 8B",
    ("V=128256 D=8192", 128): "Llama 3 70B",
    ("V=151936 D=4096", 256): "Qwen3 8B",
    ("V=151936 D=2048", 320): "Qwen3 1.7B",
    ("V=201088 D=2880", 512): "gpt-oss",
}
OVER_CUBLAS_BATCHES = (1, 16, 64, 96, 128, 160, 192, 224, 256, 320, 384, 512)
PEER_BATCHES = (1, 64, 256)
PEER_HEADS = ("V=151936 D=4096", "V=128256 D=8192", "V=151936 D=2048", "V=201088 D=2880")
DRAFTS_BATCHES = (1, 64)
TRITON_BATCHES = (1, 16, 64, 96, 128, 144, 160, 176, 192, 208, 256, 272, 320, 384, 448, 512)
RANK_BATCHES = (1, 16, 64, 128, 256)
FILTERS = ("top-k top-p", "top-p", "min-p")
REQUESTS = (*FILTERS, "mask", "penalties", "top_logprobs=5", "everything")
DRAFTS_PEERS = ("compiled torch", "FlashInfer")  # the steps of ``benchmarks.verify`` that are not ours
README_ENGINE_KINDS = ("plain", "top-k top-p")
ENGINE_KINDS = (*README_ENGINE_KINDS, "min-p penalties", "logprobs=5", "grammar mask")


def load_result(benchmark: str) -> dict[str, Any]:
    """Reads the last result of a benchmark from benchmarks/results."""
    result: dict[str, Any] = json.loads((RESULTS / f"{benchmark}.json").read_text(encoding="utf-8"))
    return result


def load_engine_results(folder: Path = RESULTS) -> list[dict[str, Any]]:
    """Reads the results of ``benchmarks.vllm_engine``."""
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("vllm_*.json"))]


def make_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a Markdown table."""
    lines = [f"| {' | '.join(cells)} |" for cells in (header, *rows)]
    return "\n".join([lines[0], "|" + "---|" * len(header), *lines[1:]]) + "\n"


def batch_header(*first: str, batches: Sequence[int]) -> list[str]:
    """Returns the header of a table with a column per batch size."""
    return [*first, f"B = {batches[0]}", *map(str, batches[1:])]


def ratio(times: Mapping[str, float], step: str, *peers: str) -> str:
    """Returns the time of a step over that of the fastest of its peers; "-" where none of them was in the run."""
    others = [times[peer] for peer in peers if peer in times]
    return f"{times[step] / min(others):.2f}" if others else "-"


def gpu_name(result: Result) -> str:
    """Returns "H200" or "H100"."""
    return str(result["machine"]["gpu"]).removeprefix("NVIDIA ").split()[0]


def head_name(row: Result) -> str:
    """Returns the sizes of the LM head."""
    return f"V={row['vocab']} D={row['dim']}"


def step_times(result: Result) -> dict[tuple[str, int], dict[str, float]]:
    """Returns the times of ``benchmarks.sample`` by LM head and batch size."""
    return {(row["config"], row["batch"]): row["ms"] for row in result["rows"]}


def readme_step_table(result: Result) -> str:
    """Returns whole steps over their peers, for the README's selection of cells."""
    times = step_times(result)
    rows = []
    for (head, batch), model in README_CELLS.items():
        ms = times[head, batch]
        peers = (["cuBLAS alone"], FLASHINFER, ["multinomial"])
        rows.append([head, model, str(batch), *(ratio(ms, "cute", *names) for names in peers)])
    return make_table(["LM head", "as in", "B", "/ bare cuBLAS", "/ FlashInfer", "/ multinomial"], rows)


def over_cublas_table(result: Result) -> str:
    """Returns the Hopper kernel's step over cuBLAS's bare matmul."""
    times = step_times(result)
    heads = dict.fromkeys(head for head, _ in times)
    rows = [
        [head, *(ratio(times[head, batch], "cute", "cuBLAS alone") for batch in OVER_CUBLAS_BATCHES)] for head in heads
    ]
    return make_table(batch_header("LM head", batches=OVER_CUBLAS_BATCHES), rows)


def peers_table(result: Result) -> str:
    """Returns the Hopper kernel's step over those of its peers, and the Triton kernel's over cuBLAS."""
    rows = []
    for (head, batch), ms in step_times(result).items():
        if batch in PEER_BATCHES and head in PEER_HEADS:
            others = [ratio(ms, "cute", *peers) for peers in (["cuBLAS alone"], FLASHINFER, ["multinomial"])]
            rows.append([head, str(batch), f"{ms['cute']:.3f}", *others, ratio(ms, "triton", "cuBLAS alone")])
    header = ["LM head", "B", "step, ms", "/ bare cuBLAS", "/ FlashInfer", "/ multinomial", "Triton / bare cuBLAS"]
    return make_table(header, rows)


def triton_table(result: Result) -> str:
    """Returns the Triton kernel's step over cuBLAS's bare matmul."""
    (head,) = result["heads"]
    ms = head["ms"]
    cells = [ratio(ms, str(batch), f"{batch} cuBLAS") for batch in TRITON_BATCHES]
    return make_table(batch_header("LM head, Triton", batches=TRITON_BATCHES), [[head["config"], *cells]])


def from_logits_table(result: Result) -> str:
    """Returns the times of ``sample_from_logits``, in microseconds."""
    times = {(row["batch"], row["request"]): row["us"] for row in result["rows"]}
    rows = [
        [str(batch), *(f"{times[batch, request]:.1f}" for request in ("unfiltered", *FILTERS))]
        for batch in dict.fromkeys(batch for batch, _ in times)
    ]
    return make_table(["B, `sample_from_logits`", "no filter, us", "top-k, top-p", "top-p", "min-p"], rows)


def requests_table(results: Iterable[Result]) -> str:
    """Returns steps with sampling parameters: over the plain step, over FlashInfer with the same filters; and their
    memory over that of (B, V) float32 logits."""
    rows = []
    for result in results:
        for row in result["rows"]:
            if row["batch"] not in PEER_BATCHES:
                continue
            ms = row["ms"]
            cells = [f"{gpu_name(result)}, {head_name(row)}", str(row["batch"]), f"{ms['cute unfiltered']:.3f}"]
            cells += [ratio(ms, request, "cute unfiltered") for request in REQUESTS]
            cells += [ratio(ms, name, f"FlashInfer {name}", f"FlashInfer {name} by radix") for name in FILTERS]
            rows.append([*cells, f"{row['peak_bytes'] / (4 * row['batch'] * row['vocab']):.2f}"])
    header = "GPU, LM head | B | plain, ms | top-k, top-p | top-p | min-p | mask | penalties | 5 top logprobs"
    header += " | everything | top-k, top-p / FI | top-p / FI | min-p / FI | memory"
    return make_table(header.split(" | "), rows)


def requests_cost_table(result: Result) -> str:
    """Returns how much longer than the plain step the steps with sampling parameters take, in microseconds."""
    rows = []
    for row in result["rows"]:
        if head_name(row) == "V=151936 D=4096":
            plain = row["ms"]["cute unfiltered"]
            costs = (f"{1000 * (row['ms'][name] - plain):.0f}" for name in (*FILTERS, "top_logprobs=5", "everything"))
            rows.append([str(row["batch"]), f"{1000 * plain:.0f}", *costs])
    return make_table(["B", "plain step, us", "top-k, top-p", "top-p", "min-p", "5 top logprobs", "everything"], rows)


def hard_requests_table(result: Result, peers: Result) -> str:
    """Returns the times of steps with hard filters, in milliseconds. ``peers``: the run that has FlashInfer's."""
    ours = {row["batch"]: row["ms"] for row in result["rows"]}
    theirs = {row["batch"]: row["ms"] for row in peers["rows"]}
    rows = []
    for name in (name for name in ours[1] if not name.startswith("FlashInfer")):
        times = [ms[name] for ms in ours.values()] + [theirs[batch].get(f"FlashInfer {name}") for batch in ours]
        rows.append([name, *("-" if time is None else f"{time:.3f}" for time in times)])
    header = [f"{who}, B = {batch}" for who in ("ms", "FlashInfer") for batch in ours]
    return make_table(["step with hard filters", *header], rows)


def drafts_table(result: Result) -> str:
    """Returns the times of ``verify`` and of its peers, in milliseconds."""
    rows = []
    for row in result["rows"]:
        if row["batch"] not in DRAFTS_BATCHES:
            continue
        cells = [head_name(row), row.get("filters", "none"), str(row["drafts"]), str(row["batch"])]
        steps = ("sample", "match", "rejection", *DRAFTS_PEERS)
        times = [f"{row['ms'][step]:.3f}" if step in row["ms"] else "-" for step in steps]
        rows.append([*cells, f"{row['accepted']:.2f}", *times])
    header = "LM head | filters | n | B | accepted | sample | match | rejection | compiled torch | FlashInfer"
    return make_table(header.split(" | "), rows)


def rank_rows(results: Iterable[Result]) -> Iterable[tuple[str, dict[str, Any]]]:
    """Yields the GPUs and the row of every cell of ``benchmarks.tensor_parallel`` with several ranks."""
    for result in results:
        for row in result["rows"]:
            if row["size"] > 1 and row["batch"] in RANK_BATCHES:
                yield f"{row['size']} {gpu_name(result)}", row


def ranks_summary_table(results: Iterable[Result]) -> str:
    """Returns a step over several GPUs over the shard's bare matmul, and over an all-gather of logits."""
    cells: dict[str, list[str]] = {}
    for gpus, row in rank_rows(results):
        ratios = [ratio(row["us"], "p2p cute", peer) for peer in ("cuBLAS alone", "all-gather + Gumbel")]
        cells.setdefault(gpus, []).append(", ".join(ratios))
    return make_table(batch_header("GPUs", batches=RANK_BATCHES), [[gpus, *row] for gpus, row in cells.items()])


def ranks_table(results: Iterable[Result]) -> str:
    """Returns the times of a step over several GPUs, in microseconds."""
    rows = []
    for gpus, row in rank_rows(results):
        if row["batch"] not in PEER_BATCHES:
            continue
        us = row["us"]
        steps = ("p2p cute", "cuBLAS alone", "nccl cute", "p2p triton", "all-gather + Gumbel")
        exchange = f"{us['p2p cute'] - us['no exchange cute']:.1f}"
        rows.append([gpus, str(row["batch"]), *(f"{us[step]:.0f}" for step in steps), exchange])
    header = "GPUs | B | `p2p`, us | bare cuBLAS | `nccl` | `p2p`, Triton | all-gather of logits | the exchange"
    return make_table(header.split(" | "), rows)


def ranks_requests_table(result: Result) -> str:
    """Returns steps with sampling parameters over several GPUs: ours, and with an all-gather of logits, in
    microseconds."""
    by_batch = {row["batch"]: row["us"] for row in result["rows"]}
    rows = []
    for name in next(iter(by_batch.values())):
        if f"all-gather, {name}" in by_batch[1]:
            cells = (f"{us[name]:.0f}, {us[f'all-gather, {name}']:.0f}" for us in by_batch.values())
            rows.append([name.replace("unfiltered", "plain"), *cells])
    return make_table(batch_header("us: ours, all-gather of logits", batches=list(by_batch)), rows)


def engine_name(result: Result) -> str:
    """Returns the model and the GPUs of a run of ``benchmarks.vllm_engine``."""
    gpu = gpu_name(result)
    return f"Qwen3-{result['shape'].upper()}, " + (f"{result['ranks']} {gpu}s" if result["ranks"] > 1 else gpu)


def engine_pairs(result: Result) -> dict[str, list[Cell]]:
    """Returns the cells of a run of an engine by kind of request."""
    pairs: dict[str, list[Cell]] = {}
    for theirs, ours in zip(result["rows"][::2], result["rows"][1::2], strict=True):
        pairs.setdefault(theirs["kind"], []).append((theirs["batch"], theirs, ours))
    return pairs


def engine_table(results: Iterable[Result], columns: Sequence[str], kinds: Sequence[str]) -> str:
    """Returns times with the plug-in over those without. ``columns``: the numbers of a cell, such as "tpot_ms"."""
    rows = []
    for result in results:
        for kind, cells in engine_pairs(result).items():
            if kind in kinds:
                by_batch = {
                    batch: ", ".join(f"{ours[name] / theirs[name]:.2f}" if name in theirs else "-" for name in columns)
                    for batch, theirs, ours in cells
                }
                rows.append([engine_name(result), kind, *(by_batch.get(batch, "-") for batch in RANK_BATCHES)])
    return make_table(batch_header("model, GPU", "request", batches=RANK_BATCHES), rows)


def sglang_table(result: Result) -> str:
    """Returns the time per token in SGLang, without and with the plug-in."""
    rows = []
    for kind, cells in engine_pairs(result).items():
        for batch, theirs, ours in cells:
            times = theirs["tpot_ms"], ours["tpot_ms"]
            rows.append([kind, str(batch), *(f"{ms:.3f}" for ms in times), f"{times[1] / times[0]:.2f}"])
    return make_table(["request", "B", "SGLang, ms", "with the plug-in, ms", "ratio"], rows)


def fill_table(text: str, table: str) -> str:
    """Returns a page whose table with the header of ``table`` is replaced by it."""
    header = re.escape(table.splitlines()[0])
    out, times = re.subn(rf"^{header}\n(\|.*\n)+", lambda _: table, text, flags=re.MULTILINE)
    if times != 1:
        raise ValueError(f"a page must have one table below {table.splitlines()[0]!r}, it has {times}")
    return out


def page_tables() -> dict[str, list[str]]:
    """Returns the tables of each page."""
    sample, drafts, engines = load_result("sample"), load_result("verify"), load_engine_results()
    ranks = [load_result("tensor_parallel"), load_result("tensor_parallel_h100")]
    engines_h200 = [result for result in engines if gpu_name(result) == "H200"]
    single = [result for result in engines_h200 if result["ranks"] == 1]
    return {
        "README.md": [
            engine_table(single, ["tpot_ms"], README_ENGINE_KINDS),
            readme_step_table(sample),
        ],
        "docs/benchmarks.md": [
            over_cublas_table(sample),
            peers_table(sample),
            triton_table(load_result("monotone")),
            from_logits_table(load_result("from_logits")),
            requests_table([load_result("requests"), load_result("requests_h100")]),
            hard_requests_table(load_result("hard_requests"), load_result("hard_requests_flashinfer")),
            drafts_table(drafts),
            ranks_table(ranks),
        ],
        "docs/kernels.md": [requests_cost_table(load_result("requests"))],
        "docs/tensor_parallel.md": [
            ranks_summary_table(ranks),
            ranks_requests_table(load_result("requests_ranks")),
        ],
        "docs/vllm.md": [engine_table(engines_h200, ["sample_ms", "tpot_ms"], ENGINE_KINDS)],
        "docs/sglang.md": [sglang_table(load_result("sglang_1.7b"))],
    }


def filled_pages() -> dict[str, str]:
    """Returns the text of each page with its tables filled."""
    return {
        page: functools.reduce(fill_table, tables, (ROOT / page).read_text(encoding="utf-8"))
        for page, tables in page_tables().items()
    }


def main() -> None:
    """Fills the tables of README.md and docs/ from benchmarks/results, and draws their plots."""
    from . import plots

    for page, text in filled_pages().items():
        (ROOT / page).write_text(text, encoding="utf-8")
    plots.over_cublas(load_result("sample"), RESULTS / "sample.png")
    plots.bandwidth(load_result("sample"), RESULTS / "bandwidth.png")
    plots.drafts(load_result("verify"), RESULTS / "verify.png")
    plots.engine(load_engine_results(), RESULTS / "vllm.png")


if __name__ == "__main__":
    typer.run(main)
