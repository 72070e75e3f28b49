"""Tables of README and docs/ that are filled from result files: ``python -m benchmarks.tables``, after
``benchmarks.verify``, ``benchmarks.requests`` or ``benchmarks.vllm_engine`` has written one, puts its figures into
the pages and draws its picture again. ``tests/project/test_docs.py`` compares them. No GPU is needed."""

import functools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import typer

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PEERS = ("compiled torch", "FlashInfer")
README_HEAD = (151936, 4096)
README_HEADER = "| LM head | n | B | match / `sample` | rejection, ms | / compiled torch | / FlashInfer |"
DRAFTER_HEADER = "| D | B | layer | and `sample` | and logits, softmax, multinomial |"
DRAFTER_STEPS = ("layer", "layer, sample", "layer, logits, softmax, multinomial")
THEIR_FILTERS = {  # FlashInfer's functions, and which of the requests they serve
    "top-k top-p": "top-k top-p",
    "top-k top-p by radix": "top-k top-p",
    "top-p": "top-p",
    "min-p": "min-p",
}
REQUESTS = ("top-k top-p", "top-p", "min-p", "mask", "penalties", "top_logprobs=5", "everything")
REQUESTS_HEADER = (
    "| GPU, LM head | B | no filter, ms | top-k, top-p | top-p | min-p | mask | penalties "
    "| 5 top logprobs | everything "
    "| / FI top-k top-p | / FI by radix | / FI top-p | / FI min-p | memory |"
)
DOCS_HEADER = "| LM head | filters | n | B | accepted | sample | match | rejection | compiled torch | FlashInfer |"

ENGINE_HEADER = (
    "| model | request | B | head + sampler: vLLM, ms | with the plug-in, ms | ratio "
    "| a token: vLLM, ms | with the plug-in, ms | ratio | head + sampler: vLLM, MiB | with the plug-in, MiB |"
)


def _table(header: str, rows: list[list[str]]) -> str:
    return (
        "\n".join([header, "|" + "---|" * (header.count("|") - 1), *(f"| {' | '.join(row)} |" for row in rows)]) + "\n"
    )


def _over(ms: Mapping[str, float], step: str, peer: str) -> str:
    """A ratio, bold where ours is not slower; "-": the peer was not in the run."""
    if peer not in ms:
        return "-"
    ratio = f"{ms[step] / ms[peer]:.2f}"
    return f"**{ratio}**" if float(ratio) <= 1 and peer in PEERS else ratio


def readme_table(result: Mapping[str, Any]) -> str:
    """Returns the table of one LM head, without filters."""
    rows = []
    for row in result["rows"]:
        ms = row["ms"]
        if (row["vocab"], row["dim"]) == README_HEAD and row.get("filters", "none") == "none":
            ratios = [_over(ms, "rejection", peer) for peer in PEERS]
            cells = [f"V={row['vocab']} D={row['dim']}", str(row["drafts"]), str(row["batch"])]
            rows.append([*cells, _over(ms, "match", "sample"), f"{ms['rejection']:.3f}", *ratios])
    return _table(README_HEADER, rows)


def docs_table(result: Mapping[str, Any]) -> str:
    """All cells, milliseconds."""
    rows = []
    for row in result["rows"]:
        cells = [f"V={row['vocab']} D={row['dim']}", row.get("filters", "none"), str(row["drafts"]), str(row["batch"])]
        steps = ("sample", "match", "rejection", *PEERS)
        times = [f"{row['ms'][step]:.3f}" if step in row["ms"] else "-" for step in steps]
        rows.append([*cells, f"{row['accepted']:.2f}", *times])
    return _table(DOCS_HEADER, rows)


def drafter_table(result: Mapping[str, Any]) -> str:
    """A drafter's layer and what draws from it, milliseconds."""
    rows = []
    for row in result["drafter"]:
        times = [f"{row['ms'][step]:.3f}" for step in DRAFTER_STEPS]
        rows.append([str(row["dim"]), str(row["batch"]), *times])
    return _table(DRAFTER_HEADER, rows)


def _gpu(result: Mapping[str, Any]) -> str:
    return str(result["machine"]["gpu"]).removeprefix("NVIDIA ").split()[0]


def requests_table(results: Iterable[Mapping[str, Any]]) -> str:
    """Returns the table of requests: time over the unfiltered step, over FlashInfer's with the same filters; memory
    over (B, V) float32."""
    rows = []
    for result in results:
        for row in result["rows"]:
            ms = row["ms"]
            head = f"{_gpu(result)}, V={row['vocab']} D={row['dim']}"
            cells = [head, str(row["batch"]), f"{ms['cute unfiltered']:.3f}"]
            cells += [_over(ms, params, "cute unfiltered") for params in REQUESTS]
            cells += [_over(ms, params, f"FlashInfer {theirs}") for theirs, params in THEIR_FILTERS.items()]
            rows.append([*cells, f"{row['peak_bytes'] / (4 * row['batch'] * row['vocab']):.2f}"])
    return _table(REQUESTS_HEADER, rows)


def engine_name(result: Mapping[str, Any]) -> str:
    """Model and GPUs of a run of ``benchmarks.vllm_engine``."""
    gpu = _gpu(result)
    return f"Qwen3-{result['shape'].upper()}, " + (f"{result['ranks']} {gpu}s" if result["ranks"] > 1 else gpu)


def engine_pairs(result: Mapping[str, Any]) -> dict[str, list[tuple[int, dict[str, Any], dict[str, Any]]]]:
    """By kind of request, of each batch size: vLLM's own row, and the plug-in's."""
    pairs: dict[str, list[tuple[int, dict[str, Any], dict[str, Any]]]] = {}
    for theirs, ours in zip(result["rows"][::2], result["rows"][1::2], strict=True):
        pairs.setdefault(theirs["kind"], []).append((theirs["batch"], theirs, ours))
    return pairs


def engine_table(results: Iterable[Mapping[str, Any]]) -> str:
    """All cells of ``benchmarks.vllm_engine``'s runs; "-": was not measured."""
    rows = []
    for result in results:
        for kind, pairs in engine_pairs(result).items():
            for batch, theirs, ours in pairs:
                cells = [engine_name(result), kind, str(batch)]
                for what in ("sample_ms", "tpot_ms"):
                    there = what in theirs and what in ours
                    cells += (
                        [f"{theirs[what]:.3f}", f"{ours[what]:.3f}", f"{ours[what] / theirs[what]:.2f}"]
                        if there
                        else ["-"] * 3
                    )
                rows.append(
                    [*cells, *(f"{row['sample_MiB']:.0f}" if "sample_MiB" in row else "-" for row in (theirs, ours))]
                )
    return _table(ENGINE_HEADER, rows)


def engine_results(folder: Path = RESULTS) -> list[dict[str, Any]]:
    """Reads the results of ``benchmarks.vllm_engine``."""
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("vllm_*.json"))]


def requests_results() -> list[dict[str, Any]]:
    """Reads the results of ``benchmarks.requests`` on an H200 and on an H100."""
    return [result_of("requests"), result_of("requests_h100")]


def with_table(text: str, table: str) -> str:
    """A page, its table with this header filled anew."""
    header = re.escape(table.splitlines()[0])
    out, times = re.subn(rf"^{header}\n(\|.*\n)+", lambda _: table, text, flags=re.MULTILINE)
    if times != 1:
        raise ValueError(f"a page must have one table below {table.splitlines()[0]!r}, it has {times}")
    return out


def pages(
    drafts: Mapping[str, Any], requests: Sequence[Mapping[str, Any]], engines: Sequence[Mapping[str, Any]]
) -> dict[Path, str]:
    """Returns the text of each page with these results."""
    tables = {
        ROOT / "README.md": [readme_table(drafts)],
        ROOT / "docs" / "benchmarks.md": [docs_table(drafts), drafter_table(drafts), requests_table(requests)],
    }
    if engines:
        tables[ROOT / "docs" / "vllm.md"] = [engine_table(engines)]
    return {path: functools.reduce(with_table, some, path.read_text(encoding="utf-8")) for path, some in tables.items()}


def result_of(benchmark: str) -> dict[str, Any]:
    """Reads the last result of a benchmark from benchmarks/results."""
    result: dict[str, Any] = json.loads((RESULTS / f"{benchmark}.json").read_text(encoding="utf-8"))
    return result


def main() -> None:
    """Fills the tables of README.md, docs/benchmarks.md and docs/vllm.md from benchmarks/results, and draws their
    pictures."""
    from . import plots

    drafts, engines = result_of("verify"), engine_results()
    for path, text in pages(drafts, requests_results(), engines).items():
        path.write_text(text, encoding="utf-8")
    plots.drafts(drafts, RESULTS / "verify.png")
    if engines:
        plots.engine(engines, RESULTS / "vllm.png")


if __name__ == "__main__":
    typer.run(main)
