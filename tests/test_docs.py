"""What docs/ says of the code is so: names, the numbers by which the code cites it, and who imports whom."""

import ast
import re
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "flashsampling"
DOCS = {name: (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8") for name in ("architecture", "contract", "traps")}
SOURCES = {  # name of a module of the package -> its file
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in PACKAGE.rglob("*.py")
}
SECTIONS = {
    int(number): text
    for number, text in re.findall(r"^## (\d+)\. (.*?)(?=^## |\Z)", DOCS["contract"], re.DOTALL | re.MULTILINE)
}
TRAPS = {int(number): row for number, row in re.findall(r"^\| (\d+) \|(.*)$", DOCS["traps"], re.MULTILINE)}


def named(text):
    """(file or folder, name in it or "") of what stands between backticks and is a path, from the root or from the package."""
    spans = re.findall(r"`([^`\s]+)`", text)
    found = (re.fullmatch(r"([\w./-]*/[\w./-]*|[\w-]+\.(?:py|md))(?:::([\w.]+))?", span) for span in spans)
    return [(match[1], match[2] or "") for match in found if match]


def definitions(path):
    """Names that a file defines: at its top, and methods and fields of classes as "Class.name"."""

    def targets(node):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            return [node.name]
        assigned = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        return [name.id for target in assigned for name in ast.walk(target) if isinstance(name, ast.Name)]

    names = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        names |= set(targets(node))
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{name}" for part in node.body for name in targets(part)}
    return names


@pytest.mark.parametrize(("file", "name"), sorted({pair for text in DOCS.values() for pair in named(text)}))
def test_what_the_docs_name_exists(file, name):
    places = [folder / f"{file}{suffix}" for folder in (ROOT, PACKAGE) for suffix in ("", ".py")]
    place = next((place for place in places if place.exists()), None)
    assert place is not None
    assert not name or name in definitions(place)


@pytest.mark.parametrize("document", DOCS)
def test_links_lead_somewhere(document):
    for target in re.findall(r"\]\((?!https?://|#)([^)\s#]+)(?:#[^)]*)?\)", DOCS[document]):
        assert (ROOT / "docs" / target).is_file(), target


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


def test_every_promise_and_every_trap_names_a_test():
    assert list(SECTIONS) == list(range(1, len(SECTIONS) + 1))
    for heading, text in [*SECTIONS.items(), *TRAPS.items()]:
        tests = [file for file, name in named(text) if file.startswith("tests/") and name]
        assert tests or "Not built" in text.splitlines()[0], heading


def imports(module):
    """Modules of the package that a module of it imports: (when it is imported, when something of it is called)."""
    path = SOURCES[module]
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    own = {module} | {module.rsplit(".", dots)[0] for dots in range(1, module.count(".") + 1)}
    found = set(), set()
    pending = [(ast.parse(path.read_text(encoding="utf-8")), False)]
    while pending:
        node, called = pending.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package.rsplit(".", node.level - 1)[0] if node.level else ""
            base = ".".join(part for part in (base, node.module) if part)
            names = [name if name in SOURCES else base for name in (f"{base}.{alias.name}" for alias in node.names)]
        for name in names:
            if name in SOURCES:
                # the packages around a module run before it; those around this one have begun already
                around = {name.rsplit(".", dots)[0] for dots in range(1, name.count(".") + 1)}
                found[called].update({name} | around - own)
        called = called or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        pending += [(child, called) for child in ast.iter_child_nodes(node)]
    return found


def test_no_circle_among_modules():
    graph = {module: imports(module)[0] for module in SOURCES}
    assert {"flashsampling.ops", "flashsampling.impl.reference"} < graph["flashsampling.api"]
    assert "flashsampling.distributed" not in graph["flashsampling.api"]  # for type checkers, and when called
    tuple(TopologicalSorter(graph).static_order())  # CycleError names the circle


def part_of(module):
    """What a row of the table calls it: packages below ``impl``, ``distributed`` and ``integrations`` are one part each."""
    names = module.split(".")[1:] or ["__init__"]
    return "/".join(names[:2] if names[0] == "impl" else names[:1])


def test_the_table_of_imports():
    parts = {part_of(module): (set(), set()) for module in SOURCES}
    for module in SOURCES:
        for mine, theirs in zip(parts[part_of(module)], imports(module)):
            mine |= {part_of(name) for name in theirs} - {part_of(module), "impl"}
    assert not any(parts.pop("impl"))  # an empty file
    rows = re.findall(r"^\| `([\w/]+)` \|([^|\n]*)\|([^|\n]*)\|", DOCS["architecture"], re.MULTILINE)
    table = {part: tuple(set(re.findall(r"`([\w/]+)`", cell)) for cell in cells) for part, *cells in rows}
    assert table == parts
