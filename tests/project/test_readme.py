"""What README and docs/ say to type works: snippets run, commands exist, and the environment named has what they
import."""

import ast
import importlib.util
import itertools
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import run_python

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli")

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
DOCS = {path.stem: path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs").glob("*.md"))}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]


def fences(language, text):
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)


def visible(text):
    """The page as a reader has it: without comments."""
    return re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)


def snippets(page=README):
    """The python that a page shows, one program: what one snippet defines the next may use. Nothing else is defined."""
    shown = fences("python", visible(page))
    assert len(shown) >= 3
    return "\n".join(shown)


def run_program(program, folder):
    path = folder / "snippets.py"
    path.write_text(program)
    run_python(path, cwd=folder, PYTHONPATH=str(ROOT), CUDA_VISIBLE_DEVICES="")


@pytest.mark.quick(0)
def test_every_snippet_runs(tmp_path):
    pytest.importorskip("transformers")
    checks = (
        "assert out.token_ids.shape == next_tokens.shape == (3,) and (out.token_ids >= 0).all()\n"
        "assert sampler.offsets[:4].tolist() == [1, 1, 1, 0]\n"
    )
    run_program(f"{snippets()}\n{checks}", tmp_path)


@pytest.mark.quick(0)
def test_the_first_snippet_needs_nothing_and_shows_where_hidden_states_come_from(tmp_path):
    pytest.importorskip("transformers")
    first, *_ = fences("python", visible(README))
    assert re.search(r"^ *hidden_states = model\.model\(.*\)\.last_hidden_state\[:, -1\]", first, flags=re.MULTILINE)
    run_program(f"{first}\nassert next_tokens.shape == (3,)\n", tmp_path)


def test_no_page_hides_what_its_snippets_need():
    """A comment of a page holds no code: who copies what is shown would miss it."""
    for page in (README, *DOCS.values()):
        assert fences("python", page) == fences("python", visible(page))


def test_the_first_snippet_of_tensor_parallelism_runs(tmp_path):
    first, *_ = fences("python", visible(DOCS["tensor_parallel"]))
    step = "flashsampling.sample(hidden_states, weight, temperature=0.8, seed=seeds)"
    checks = f"assert torch.equal(tokens, {step}.token_ids)\nassert out.logprobs.shape == (8,)\n"
    run_program(f"{first}\n{checks}", tmp_path)


def test_the_snippets_about_drafts_run():
    names: dict[str, Any] = {}
    exec(snippets(DOCS["speculative"]), names)
    assert names["out"].accepted_drafts.shape == (2, 3)


def imported(path):
    """Top-level names of the other packages that a file imports when it is imported itself."""
    found = set()
    for node in ast.parse((ROOT / path).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.add(node.module.split(".")[0])
    return found - set(sys.stdlib_module_names) - {"benchmarks", "flashsampling", "scripts", "tests"}


@pytest.mark.parametrize(
    ("extras", "pattern"),
    [
        ("bench,cute,triton", "benchmarks/*.py"),
        ("bench,cute,triton", "tests/problems.py"),  # the benchmarks' gate
        ("bench,cute,triton", "tests/emulator/*.py"),
        ("bench", "scripts/sass_diff.py"),
        ("demo", "scripts/demo_generate.py"),
        ("demo", "scripts/decode_tp"),
        ("demo", "scripts/speculate"),
    ],
)
def test_what_a_command_imports_is_in_its_extras(extras, pattern):
    brought = PROJECT["dependencies"] + [entry for extra in extras.split(",") for entry in EXTRAS[extra]]
    names = {re.split(r"[^\w-]", entry)[0].replace("-", "_") for entry in brought} | {"numpy"}
    names |= {"transformers"} if "demo" in extras else set()  # flashsampling[transformers]
    names |= {"cutlass", "tvm_ffi", "cuda"} if "cute" in extras else set()
    files = list(ROOT.glob(pattern))
    assert files
    assert {path.name: extra for path in files if (extra := imported(path) - names)} == {}


def commands():
    """The commands in fences and, with Python, between backticks."""
    pages = (README, CONTRIBUTING, *DOCS.values())
    said = [command for text in pages for command in re.findall(r"`(python -m [^`]+)`", text)]
    said += re.findall(r"^    (\./[^#\n]+)", CONTRIBUTING, flags=re.MULTILINE)
    lines = [line for text in (README, *DOCS.values()) for block in fences("bash", text) for line in block.splitlines()]
    said += [line for line in lines if line.startswith(("python ", "./", ".venv", "pip ", "flashsampling "))]
    said = [" ".join(command.partition(" #")[0].split()) for command in said]
    return list(dict.fromkeys(command for command in said if "..." not in command))


COMMANDS = commands()


def test_the_commands_are_found():
    for expected in (
        "./scripts/demo",
        "./scripts/test",
        "flashsampling precompile",
        "python -m benchmarks.sample_cpu",
        "python -m benchmarks.profile_step cute",
        "python -m torch.distributed.run --standalone --nproc_per_node 2 -m benchmarks.exchange",
    ):
        assert expected in COMMANDS


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_has_its_script(command):
    words = command.split()
    scripts = [ROOT / word for word in words if word.startswith(("./scripts/", "scripts/"))]
    modules = [name for option, name in itertools.pairwise(words) if option == "-m"]
    extras = re.findall(r"\.\[([\w,]+)\]", command)
    assert scripts or modules or words[0] in (*PROJECT["scripts"], "pip")
    assert all(os.access(script, os.X_OK) for script in scripts)
    assert all(importlib.util.find_spec(name) for name in modules)
    assert set(",".join(extras).split(",")) <= {*EXTRAS, ""}


def test_what_pypi_shows_has_no_relative_link():
    spec = importlib.util.spec_from_file_location("setup_of_flashsampling", ROOT / "setup.py")
    setup = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(setup)
    relative = re.compile(r"\]\((?!https?://|#)")
    assert relative.search(README)
    for repository in ("", "https://example.org/owner/name"):
        text = setup.for_pypi(README, repository)
        assert not relative.search(text)
        assert ("https://example.org/owner/name/raw/main/benchmarks/results/sample.png" in text) == bool(repository)
        assert "[`sample.json`]" in text or not repository
        assert text.count("```python") == README.count("```python")
