"""Tables of README and docs/ that are filled from a result file: ``python -m benchmarks.tables``, after ``benchmarks.verify``
has written it, puts its figures into the pages and draws its picture again. ``tests/test_docs.py`` compares them. No GPU is
needed."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULT = ROOT / "benchmarks" / "results" / "verify.json"
PEERS = ("compiled torch", "FlashInfer")
README_HEAD = (151936, 4096)
README_HEADER = "| LM head | n | B | match / `sample` | rejection, ms | / compiled torch | / FlashInfer |"
DOCS_HEADER = "| LM head | filters | n | B | accepted | sample | match | rejection | compiled torch | FlashInfer |"


def _table(header: str, rows: list[list[str]]) -> str:
    return "\n".join([header, "|" + "---|" * (header.count("|") - 1), *(f"| {' | '.join(row)} |" for row in rows)]) + "\n"


def _over(ms: Mapping[str, float], step: str, peer: str) -> str:
    """A ratio, bold where ours is not slower; "-": the peer was not in the run."""
    if peer not in ms:
        return "-"
    ratio = f"{ms[step] / ms[peer]:.2f}"
    return f"**{ratio}**" if float(ratio) <= 1 and peer in PEERS else ratio


def readme_table(result: Mapping[str, Any]) -> str:
    """Of one head, without filters."""
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


def with_table(text: str, table: str) -> str:
    """A page, its table with this header filled anew."""
    header = re.escape(table.splitlines()[0])
    out, times = re.subn(rf"^{header}\n(\|.*\n)+", lambda _: table, text, flags=re.MULTILINE)
    if times != 1:
        raise ValueError(f"a page must have one table below {table.splitlines()[0]!r}, it has {times}")
    return out


def pages(result: Mapping[str, Any]) -> dict[Path, str]:
    """What the pages say after a run."""
    tables = {ROOT / "README.md": readme_table(result), ROOT / "docs" / "benchmarks.md": docs_table(result)}
    return {path: with_table(path.read_text(encoding="utf-8"), table) for path, table in tables.items()}


def main() -> None:
    """Fills them."""
    from . import plots

    result = json.loads(RESULT.read_text(encoding="utf-8"))
    for path, text in pages(result).items():
        path.write_text(text, encoding="utf-8")
    plots.drafts(result, RESULT.with_suffix(".png"))


if __name__ == "__main__":
    main()
