"""What README and docs/ say to type works: snippets run, commands exist, and the environment named has what they
import."""

import ast
import importlib.util
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
OURS = ("benchmarks", "flashsampling", "scripts", "tests")
ENVIRONMENTS = {"./scripts/demo": "demo", "./scripts/test": "test"}  # what the script asks of make_environment
# others are named as their package
MODULES = {"nvidia-cutlass-dsl": ("cutlass", "cuda"), "apache-tvm-ffi": ("tvm_ffi",)}


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


BROUGHT = {"benchmarks/sglang_engine.py": {"transformers"}}  # by SGLang, which that is for


def requirements(extras):
    """Distribution names that the package and its extras bring, extras of the package itself followed."""
    names: set[str] = set()
    for requirement in PROJECT["dependencies"] + [entry for extra in extras for entry in EXTRAS[extra]]:
        name, own = re.match(r"([\w-]+)(?:\[([\w,]+)\])?", requirement).groups()
        names |= requirements(own.split(",")) if name == PROJECT["name"] else {name}
    return names


def imports(source, seen=None):
    """Top-level names of other packages that a file of this repository imports; its own imports are followed."""
    seen = set() if seen is None else seen
    if source in seen:
        return set()
    seen.add(source)
    found = set()
    pending = [ast.parse(source.read_text(encoding="utf-8"))]
    while pending:
        node = pending.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue  # imported when called
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            parts = list(source.relative_to(ROOT).parts[: -node.level]) if node.level else []
            base = ".".join([*parts, *([node.module] if node.module else [])])
            names = [base, *(f"{base}.{alias.name}" for alias in node.names)]
        for name in names:
            top = name.split(".")[0]
            if top not in OURS:
                found.add(top)
                continue
            place = ROOT.joinpath(*name.split("."))
            packages = [ROOT.joinpath(*name.split(".")[:end], "__init__.py") for end in range(1, name.count(".") + 2)]
            for file in (place.with_suffix(".py"), *packages):
                if file.is_file():
                    found |= imports(file, seen)
        pending += ast.iter_child_nodes(node)
    return found - set(sys.stdlib_module_names)


def missing(source, extras):
    modules = {module for name in requirements(extras) for module in MODULES.get(name, (name.replace("-", "_"),))}
    return imports(source) - modules


def commands():
    """(command, extras of the environment that it runs in), from the fences and from what stands between backticks."""
    for block in fences("bash", README):
        extras = None
        for line in block.splitlines():
            command = line.partition(" #")[0].strip()
            if command.startswith("pip install"):
                extras = extras_of(command)
            if command:
                yield command, extras
    pages = (README, CONTRIBUTING, *DOCS.values())
    said = [command for text in pages for command in re.findall(r"`(python -m [^`]+)`", text)]
    said += re.findall(r"^    (\./[^#\n]+)", CONTRIBUTING, flags=re.MULTILINE)
    lines = [
        line.partition(" #")[0]
        for text in DOCS.values()
        for block in fences("bash", text)
        for line in block.splitlines()
    ]
    said += [line for line in lines if line.startswith(("python ", "./", ".venv"))]
    yield from ((" ".join(command.split()), ["bench", "cute", "triton"]) for command in said if "..." not in command)


def extras_of(install):
    return [extra for group in re.findall(r"\.\[([\w,]+)\]", install) for extra in group.split(",")]


COMMANDS = list(dict.fromkeys((command, tuple(extras or ())) for command, extras in commands()))


def test_the_commands_are_found():
    said = [command for command, _ in COMMANDS]
    for expected in (
        "./scripts/demo",
        "./scripts/test",
        "flashsampling precompile",
        "python -m benchmarks.sample_cpu",
        "python -m benchmarks.profile_step cute",
        "python -m torch.distributed.run --standalone --nproc_per_node 2 -m benchmarks.exchange",
    ):
        assert expected in said


@pytest.mark.quick(8)
@pytest.mark.parametrize(("command", "extras"), COMMANDS, ids=[command for command, _ in COMMANDS])
def test_a_command_has_its_script_and_what_that_imports(command, extras):
    words = command.split()
    if words[0] in PROJECT["scripts"]:
        words = ["python", "-m", PROJECT["scripts"][words[0]].partition(":")[0], *words[1:]]
    if words[:2] == ["pip", "install"]:
        for extra in extras_of(command):
            assert extra in EXTRAS
        return
    if words[0].startswith("./"):
        script = ROOT / words[0]
        assert os.access(script, os.X_OK)
        extra = ENVIRONMENTS.get(words[0])
        if extra is None:
            return
        assert f" {extra}\n" in script.read_text()
        module = re.search(r'"\$PYTHON" -m (scripts\.\w+)', script.read_text())
        if module:
            assert not missing(ROOT / (module[1].replace(".", "/") + ".py"), [extra])
        return
    if words[0].startswith(".venv"):
        extras = [words[0].split("/")[0].removeprefix(".venv-")]
    else:
        assert words[0] == "python", f"{words[0]} belongs to no environment that the README names"
    assert words[1] == "-m"
    script = next((ROOT / word for word in words if word.startswith("scripts/")), None)
    if script is not None:
        assert words[2] == "torch.distributed.run"
        source = script
        assert os.access(source, os.X_OK)
    else:
        name = words[words.index("-m", 3) + 1] if words[2] == "torch.distributed.run" else words[2]
        spec = importlib.util.find_spec(name)
        assert spec is not None
        source = Path(spec.origin)
        if source.name == "__init__.py":
            source = source.with_name("__main__.py")
    assert source.is_relative_to(ROOT)
    assert missing(source, extras) <= BROUGHT.get(source.relative_to(ROOT).as_posix(), set())


def test_what_the_import_check_says():
    """The check finds typer of a command after ``pip install .[cute]``, and pytest of the benchmarks' gate."""
    assert missing(ROOT / "scripts" / "demo_generate.py", ["cute"]) == {"typer", "rich", "transformers"}
    assert "pytest" in imports(ROOT / "benchmarks" / "sample_cpu.py")
    assert missing(ROOT / "flashsampling" / "__main__.py", []) == set()


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
