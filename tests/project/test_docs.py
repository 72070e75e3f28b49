"""What the pages say is so: links, files, names, the numbers by which the code cites it, who imports whom, measured
figures."""

import ast
import json
import re
from pathlib import Path

import pytest

from benchmarks import tables

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "flashsampling"
DOCS = {name: (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8") for name in ("design", "contract", "traps")}
PAGES = {
    path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
    for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]
}
FOLDERS = ("flashsampling", "tests", "benchmarks", "docs", "examples", "scripts", ".ci")
FILES = {path.relative_to(ROOT).as_posix() for place in FOLDERS for path in (ROOT / place).rglob("*")}
FILES |= {*FOLDERS, *(path.name for path in ROOT.iterdir() if path.is_file())}
RESULTS = ROOT / "benchmarks" / "results"
TABLES = tables.load_result("hopper_profile")["tables"]
LENGTHS = {  # page -> greatest number of lines
    "README.md": 150,
    "CONTRIBUTING.md": 60,
    "SECURITY.md": 45,
    "docs/adding.md": 80,
    "docs/benchmarks.md": 240,
    "docs/blackwell.md": 30,
    "docs/contract.md": 150,
    "docs/design.md": 200,
    "docs/glossary.md": 50,
    "docs/kernels.md": 200,
    "docs/rollouts.md": 120,
    "docs/sglang.md": 80,
    "docs/speculative.md": 90,
    "docs/tensor_parallel.md": 150,
    "docs/traps.md": 80,
    "docs/transformers.md": 120,
    "docs/vllm.md": 150,
}
LARGEST_SUM = 1600  # lines of README.md and docs/
SOURCES = {  # name of a module of the package -> its file
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in PACKAGE.rglob("*.py")
}
SECTIONS = {
    int(number): text
    for number, text in re.findall(r"^## (\d+)\. (.*?)(?=^## |\Z)", DOCS["contract"], re.DOTALL | re.MULTILINE)
}
TRAPS = {int(number): row for number, row in re.findall(r"^\| (\d+) \|(.*)$", DOCS["traps"], re.MULTILINE)}


def named(text):
    """(file or folder, name in it or "") of what stands between backticks and is a path, from the root or from the
    package."""
    spans = re.findall(r"`([^`\s]+)`", text)
    found = (re.fullmatch(r"([\w./-]*/[\w./-]*|[\w-]+\.(?:py|md))(?:::([\w.]+))?", span) for span in spans)
    return [(match[1], match[2] or "") for match in found if match]


def definitions(path):
    """Names that a file defines: at its top, and methods and fields of classes as "Class.name"."""

    def targets(node):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            return [node.name]
        assigned = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        return [name.id for target in assigned for name in ast.walk(target) if isinstance(name, ast.Name)]

    names = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        names |= set(targets(node))
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{name}" for part in node.body for name in targets(part)}
    return names


def anchors(text):
    """What a heading is linked by."""
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\((?!https?://)([^)\s]+)\)", PAGES[page]):
        path, _, anchor = target.partition("#")
        file = ((ROOT / page).parent / path).resolve() if path else ROOT / page
        assert file.is_file(), target
        assert not anchor or anchor in anchors(file.read_text(encoding="utf-8")), target


@pytest.mark.parametrize("page", PAGES)
def test_what_a_page_names_exists(page):
    words = set(re.findall(r"[\w./-]+\.(?:cuh?|json|md|png|py|sh|toml)\b", PAGES[page]))
    for word, name in {(word, "") for word in words} | set(named(PAGES[page])):
        ends = tuple("/" + re.sub(r"^(\.\.?/)+", "", word).rstrip("/") + suffix for suffix in ("", ".py"))
        found = [file for file in FILES if f"/{file}".endswith(ends)]
        assert found, word
        assert not name or any(name in definitions(ROOT / file) for file in found), (word, name)


@pytest.mark.parametrize("page", PAGES)
def test_the_rows_of_a_table_have_its_columns(page):
    for block in re.findall(r"(?:^\|.*\n)+", PAGES[page], re.MULTILINE):
        rows = block.splitlines()
        assert re.fullmatch(r"\|(?:-+\|)+", rows[1]), rows[0]
        assert len({len(re.findall(r"(?<!\\)\|", row)) for row in rows}) == 1, rows[0]


def cells_of(row):
    return [cell.strip().strip("*") for cell in row.strip("|").split("|")]


def rows_below(text, first):
    """Cells of the rows of the table whose header begins so."""
    (block,) = re.findall(rf"^{re.escape(first)}.*\n\|[-|]+\n((?:\|.*\n)+)", text, re.MULTILINE)
    return [cells_of(row) for row in block.splitlines()]


def test_the_pages_have_their_lengths():
    lengths = {page: len(text.splitlines()) for page, text in PAGES.items() if page != "CHANGELOG.md"}
    assert set(lengths) == set(LENGTHS)
    assert {page: length for page, length in lengths.items() if length > LENGTHS[page]} == {}
    read = (length for page, length in lengths.items() if page.startswith(("docs/", "README")))
    assert sum(read) <= LARGEST_SUM


@pytest.mark.parametrize("page", sorted(set(LENGTHS) - {"docs/traps.md", "docs/adding.md"}))
def test_a_line_has_at_most_120_characters(page):
    """Rows of tables may be longer."""
    assert [line for line in PAGES[page].splitlines() if len(line) > 120 and not line.startswith("|")] == []


def commit_hashes(text):
    """Words that read as an abbreviated or a whole commit hash."""
    return re.findall(r"\b(?=[0-9a-f]*[0-9])(?=[0-9a-f]*[a-f])(?:[0-9a-f]{7,12}|[0-9a-f]{40})\b", text)


@pytest.mark.parametrize("page", sorted(LENGTHS))
def test_a_page_names_no_commit(page):
    assert commit_hashes(PAGES[page]) == []


def test_no_docstring_names_a_commit():
    assert commit_hashes("5acfde7, 1146ad7 and 151936 tokens, deadbeef") == ["5acfde7", "1146ad7"]
    named_commits = {
        module: hashes
        for module, path in SOURCES.items()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
        if (hashes := commit_hashes(ast.get_docstring(node) or ""))
    }
    assert named_commits == {}


def test_the_tables_are_those_of_the_runs():
    """``python -m benchmarks.tables`` changes nothing."""
    for page, text in tables.filled_pages().items():
        assert text == PAGES[page]


def test_the_peer_of_a_ratio_is_the_fastest():
    ms = {"cute": 3.0, "FI1": 6.0, "FI2": 4.0, "cuBLAS alone": 2.0, "multinomial": 12.0}
    assert tables.ratio(ms, "cute", *tables.FLASHINFER) == "0.75"
    assert tables.ratio(ms, "cute", "absent") == "-"
    head, batch = next(iter(tables.README_CELLS))
    rows = [{"config": head, "batch": batch, "ms": ms} for head, batch in tables.README_CELLS]
    first = f"| {head} | {tables.README_CELLS[head, batch]} | {batch} | 1.50 | 0.75 | 0.25 |"
    assert tables.readme_step_table({"rows": rows}).splitlines()[2] == first


def numbers(text):
    return {float(number) for number in re.findall(r"\d+(?:\.\d+)?", text)}


@pytest.mark.parametrize("file", sorted(path.name for path in RESULTS.glob("*.json")))
def test_results_are_json(file):
    def no_number(word):
        raise AssertionError(word)  # NaN and infinities, which Python writes, are not JSON

    json.loads((RESULTS / file).read_text(encoding="utf-8"), parse_constant=no_number)


def test_what_was_tried_has_its_figures_in_the_results():
    hopper, experiments = ((RESULTS / f"{name}.md").read_text(encoding="utf-8") for name in ("hopper", "experiments"))
    named = r"`([a-z0-9]+(?:_[a-z0-9]+)+)`"
    assert set(re.findall(named, hopper + experiments)) >= set(TABLES)
    kernels = PAGES["docs/kernels.md"].partition("## The filtered-sampling kernels")[0]
    assert {"noise_alone", "ncu_whole_kernel"} <= set(re.findall(named, kernels)) - {"gumbel_bounds"} <= set(TABLES)
    for _, case, before, after, commit, _, raw in map(
        cells_of, re.findall(r"^\|(?:[^|\n]+\|){7}$", experiments, re.MULTILINE)
    ):
        if commit not in ("commit", "---"):
            tables = json.dumps([TABLES[name] for name in re.findall(r"`(\w+)`", raw)])
            assert re.fullmatch(r"[0-9a-f]{7}", commit)
            assert raw
            assert numbers(f"{before} {after}") <= numbers(tables), (case, before, after)
    profile = [list(map(int, row)) for row in rows_below(PAGES["docs/kernels.md"], "| D | B | DRAM |")]
    assert profile == TABLES["ncu_whole_kernel"]["rows"]


def cited(pattern, text):
    """Numbers after a word that ``pattern`` matches: "trap 3", "traps 26, 27, 29", "Trap 3 and 11"."""
    lists = re.findall(rf"\b{pattern}s? (\d+(?:(?:, | and )\d+)*)", re.sub(r"[\s#]+", " ", text), re.IGNORECASE)
    return {int(number) for numbers in lists for number in re.findall(r"\d+", numbers)}


def test_what_the_code_cites_is_there():
    files = [path for folder in (PACKAGE, ROOT / "tests") for path in folder.rglob("*.py") if path != Path(__file__)]
    text = "\n".join(path.read_text(encoding="utf-8") for path in files)
    sections, traps = cited("section", text), cited("trap", text)
    assert {2, 3, 4} <= sections <= set(SECTIONS)
    assert {1, 11, 26, 27, 29} <= traps <= set(TRAPS)
    assert {number for document in DOCS.values() for number in cited("section", document)} <= set(SECTIONS)
    assert {number for document in DOCS.values() for number in cited("trap", document)} <= set(TRAPS)


def test_every_section_and_every_trap_names_a_test():
    assert list(SECTIONS) == list(range(1, len(SECTIONS) + 1))
    held_by = {int(section): cell for section, cell in rows_below(DOCS["contract"], "| section | held by |")}
    assert list(held_by) == list(SECTIONS)
    for cell in held_by.values():
        assert all(file.startswith("tests/") for file, _ in named(cell))
        assert named(cell)
    for heading, text in TRAPS.items():
        tests = [file for file, name in named(text) if file.startswith("tests/") and name]
        assert tests or "Not built" in text.splitlines()[0], heading


def imports(module):
    """Modules of the package that a module of it imports when it is imported itself."""
    path = SOURCES[module]
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    own = {module} | {module.rsplit(".", dots)[0] for dots in range(1, module.count(".") + 1)}
    found: set[str] = set()
    pending: list[ast.AST] = [ast.parse(path.read_text(encoding="utf-8"))]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        if isinstance(node, ast.ImportFrom):
            base = package.rsplit(".", node.level - 1)[0] if node.level else ""
            base = ".".join(part for part in (base, node.module) if part)
            names = {name if name in SOURCES else base for name in (f"{base}.{alias.name}" for alias in node.names)}
            found |= names & set(SOURCES)
        pending += ast.iter_child_nodes(node)
    return found - own


LAYERS = (  # a module imports, when it is imported, nothing of a later layer
    {"noise", "exchange_protocol", "row_params", "token_counts", "torch_internals", "workspace"},
    {"param_parsers", "sampling_params"},
    {"inputs", "outputs", "backends"},
    {"reference", "kernels"},
    {"ops", "sampling"},
    {"speculative", "sampler", "warmup", "request_pool", "scoring"},
    {"tensor_parallel", "integrations"},
)


def test_layers():
    """And a backend imports no other, but the oracle's arithmetic."""
    layer_of = {name: layer for layer, names in enumerate(LAYERS) for name in names}
    assert set(layer_of) == {module.split(".")[1] for module in SOURCES if "." in module} - {"__main__"}
    for module in SOURCES:
        part = module.split(".")[1] if "." in module else ""
        for name in imports(module) if part in layer_of else ():
            other = name.split(".")[1] if "." in name else ""
            if not name.startswith("flashsampling.speculative"):  # where drafts stand, kernels know too
                assert layer_of.get(other, 0) <= layer_of[part], (module, name)
            if part == "kernels" and other == "reference":
                assert name.removeprefix("flashsampling.reference") in ("", ".logit_transforms"), module
