"""The pictures of README and docs/, from the result files of ``benchmarks.sample``, ``benchmarks.tensor_parallel``,
``benchmarks.verify`` and ``benchmarks.vllm_engine``."""

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from . import tables

_STYLES: dict[str, dict[str, Any]] = {
    "cute": {"color": "#d62728", "linewidth": 2.4, "marker": "o", "zorder": 5},
    "triton": {"color": "#ff7f0e", "linewidth": 2.0, "marker": "o", "zorder": 4},
    "streaming": {"color": "#ff9896", "linestyle": ":"},
    "FlashInfer": {"color": "#1f77b4"},
    "multinomial": {"color": "#7f7f7f"},
}


def _panels(result: dict[str, Any]) -> list[tuple[str, list[dict[str, Any]]]]:
    names = list(dict.fromkeys(row["config"] for row in result["rows"]))
    return [(name, [row for row in result["rows"] if row["config"] == name]) for name in names]


def _label_batches(axis: Any, batches: list[int]) -> None:
    """Powers of two, since others stand too close for their labels; each has its dot."""
    labelled = [batch for batch in batches if batch & (batch - 1) == 0]
    axis.set_xticks(labelled, [str(batch) for batch in labelled], rotation=60, fontsize=8)


def over_cublas(result: dict[str, Any], path: Path) -> None:
    """Draws the time of each step over that of the bare cuBLAS matmul: below 1 the step is faster. FlashInfer is the
    fastest of its variants."""
    panels = _panels(result)
    lines = -(-len(panels) // 3)
    figure, grid = plt.subplots(lines, 3, figsize=(14.0, 3.8 * lines), sharey=True, squeeze=False)
    axes = list(grid.flat)
    for axis in axes[len(panels) :]:
        axis.set_visible(False)
    for axis, (name, rows) in zip(axes, panels):
        for step, style in _STYLES.items():
            variants = tables.FLASHINFER if step == "FlashInfer" else (step,)
            points = [
                (row["batch"], min(times) / row["ms"]["cuBLAS alone"])
                for row in rows
                if (times := [row["ms"][variant] for variant in variants if variant in row["ms"]])
            ]
            if points and step != "streaming":
                axis.plot(*zip(*points), label=step, **{"marker": ".", **style})
        axis.axhline(1.0, color="black", linewidth=0.8, linestyle="--")
        axis.set(title=name, xscale="log", xlabel="batch size")
        _label_batches(axis, [row["batch"] for row in rows])
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    for line in grid:
        line[0].set_ylabel("time of the step / bare cuBLAS matmul")
    axes[0].set_ylim(bottom=0.8)
    axes[0].legend()
    figure.suptitle(
        f"LM head to token ids, {result['machine']['gpu']}: lower is better; "
        "at the dashed line a step takes as long as the matmul alone"
    )
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def bandwidth(result: dict[str, Any], path: Path) -> None:
    """Bytes of the weight over the time of the step, as a share of the read bandwidth measured in the same run."""
    ours = next(name for name in _STYLES if name in result["rows"][0]["ms"])
    figure, axis = plt.subplots(figsize=(6.4, 4.0))
    for name, rows in _panels(result):
        points = [
            (row["batch"], 100 * row["weight_bytes"] / row["ms"][ours] / 1e9 / result["read_tb_s"]) for row in rows
        ]
        axis.plot(*zip(*points), marker="o", label=name)
    batches = sorted({row["batch"] for row in result["rows"]})
    axis.axhline(100, color="black", linewidth=0.8, linestyle="--")
    axis.set(xscale="log", xlabel="batch size", ylabel="% of measured read bandwidth", ylim=(0, 108))
    axis.set_title(
        f"Weight bandwidth of the {ours} step, {result['machine']['gpu']} ({result['read_tb_s']:.2f} TB/s read)"
    )
    _label_batches(axis, batches)
    axis.minorticks_off()
    axis.grid(alpha=0.3)
    axis.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def scaling(result: dict[str, Any], path: Path) -> None:
    """Time of a tensor-parallel step over the number of GPUs, from a result file of ``benchmarks.tensor_parallel``."""
    first = result["implementations"][0]
    batches = [batch for batch in (1, 16, 64, 256) if any(row["batch"] == batch for row in result["rows"])]
    figure, axes = plt.subplots(1, len(batches), figsize=(3.6 * len(batches), 3.8), squeeze=False, sharey=True)
    styles = {
        f"p2p {first}": "#d62728",
        f"nccl {first}": "#ff9896",
        "cuBLAS alone": "#7f7f7f",
        "all-gather + Gumbel": "#1f77b4",
    }
    for axis, batch in zip(axes[0], batches):
        rows = [row for row in result["rows"] if row["batch"] == batch]
        alone = [row["us"][f"no exchange {first}"] for row in rows if row["size"] == 1]
        for name, color in styles.items():
            points = [(row["size"], row["us"][name]) for row in rows if name in row["us"]]
            if alone and name.endswith(first):
                points = [(1, alone[0]), *points]
            if points:
                axis.plot(*zip(*points), label=name, color=color, marker="o")
        sizes = sorted({row["size"] for row in rows})
        if alone:
            axis.plot(
                sizes, [alone[0] / size for size in sizes], label="ideal", color="black", linewidth=0.8, linestyle="--"
            )
        axis.set(title=f"B = {batch}", xscale="log", yscale="log", xlabel="GPUs")
        axis.set_xticks(sizes, [str(size) for size in sizes])
        axis.set_yticks([50, 100, 200, 400, 800, 1600], ["50", "100", "200", "400", "800", "1600"])
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("us a step")
    axes[0][-1].legend(loc="lower left")
    figure.suptitle(
        f"LM head to token ids over GPUs, V={result['vocab']} D={result['dim']}, {result['machine']['gpu']}"
    )
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def drafts(result: dict[str, Any], path: Path) -> None:
    """Time of rejection over the rows that are verified, with what others take, from a result file of
    ``benchmarks.verify``."""
    rows = [row for row in result["rows"] if row.get("filters", "none") == "none"]
    panels = list(dict.fromkeys((row["vocab"], row["dim"], row["drafts"]) for row in rows))
    styles: dict[str, dict[str, Any]] = {
        "rejection": {"color": "#d62728", "linewidth": 2.4, "zorder": 5},
        "match": {"color": "#ff9896", "linewidth": 2.0, "zorder": 4},
        "FlashInfer": {"color": "#1f77b4"},
        "compiled torch": {"color": "#7f7f7f"},
        "cuBLAS alone": {"color": "black", "linewidth": 0.8, "linestyle": "--"},
    }
    lines = -(-len(panels) // 2)
    figure, grid = plt.subplots(lines, 2, figsize=(10.0, 3.6 * lines), squeeze=False)
    axes = list(grid.flat)
    for axis in axes[len(panels) :]:
        axis.set_visible(False)
    for axis, (vocab, dim, n) in zip(axes, panels):
        of_panel = [row for row in rows if (row["vocab"], row["dim"], row["drafts"]) == (vocab, dim, n)]
        for step, style in styles.items():
            points = [(row["batch"] * (n + 1), row["ms"][step]) for row in of_panel if step in row["ms"]]
            if points:
                axis.plot(*zip(*points), label=step, **{"marker": "o", **style})
        axis.set(
            title=f"V={vocab} D={dim}, {n} drafts", xscale="log", xlabel="rows: requests x (drafts + 1)", ylim=(0, None)
        )
        sizes = [row["batch"] * (n + 1) for row in of_panel]
        axis.set_xticks(sizes, [str(size) for size in sizes])
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    for line in grid:
        line[0].set_ylabel("ms")
    axes[0].legend()
    figure.suptitle(f"Drafts verified, from hidden states, {result['machine']['gpu']}")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def engine(results: list[dict[str, Any]], path: Path) -> None:
    """Time of LM head and sampler in an engine with the plug-in over that without it, a panel per model, from result
    files of ``benchmarks.vllm_engine``."""
    across = min(len(results), 3)
    down = -(-len(results) // across)
    figure, axes = plt.subplots(down, across, figsize=(5.6 * across, 4.0 * down), squeeze=False)
    for axis in axes.flat[len(results) :]:
        axis.set_axis_off()
    for axis, result in zip(axes.flat, results):
        for kind, pairs in tables.engine_pairs(result).items():
            points = [(batch, ours["sample_ms"] / theirs["sample_ms"]) for batch, theirs, ours in pairs]
            axis.plot(*zip(*points), marker="o", label=kind)
        axis.axhline(1.0, color="black", linewidth=0.8, linestyle="--")
        axis.set(title=tables.engine_name(result), xscale="log", xlabel="batch size", ylim=(0, None))
        _label_batches(axis, sorted({row["batch"] for row in result["rows"]}))
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    for row in axes:
        row[0].set_ylabel("head + sampler: with the plug-in / without")
    axes[0][0].legend(loc="lower left")
    figure.suptitle(
        f"vLLM {results[0]['machine']['vllm']}: lower is better; below the dashed line the plug-in is faster"
    )
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
