"""Whether a change leaves the machine code as it is. Without a GPU: ``scripts/sass-diff COMMIT``.

For a commit and for the working tree, every tile shape of the Hopper kernel in both dtypes, two shapes as tests and
benchmarks instrument them, and the cases of ``tests/kernels/triton/test_compile.py`` for sm_90 and sm_100 are compiled
and compared:

    Hopper kernel   cubin: the bytes of its code, its constants and what the loader reads (registers, shared memory)
    Triton          PTX without comments, line numbers and names; ptxas does the rest alike

Names of functions and files, and lines, are in none of these. ``nvdisasm``, if there is one, says which instructions
differ. What is not compared is what runs on the host: a launch's grid and the size of its shared memory.
"""

import difflib
import importlib.metadata
import importlib.util
import io
import json
import os
import re
import runpy
import shutil
import struct
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from flashsampling.kernels.hopper.config import CONFIGS

ROOT = Path(__file__).parent.parent
ARCHITECTURES = (90, 100)  # of Triton's cases
_TOGETHER = 4  # kernels that one process compiles: importing the compiler takes as long as compiling one

# Run in either tree, so they ask of it only what is old and will stay: names in ``compile_kernel`` and in the test.
_CUTE = """
import cutlass
try:
    from flashsampling.kernels.hopper.config import TileConfig
    from flashsampling.kernels.hopper.kernel import compile_kernel
except ImportError:  # commits before the package had these folders
    from flashsampling.impl.cute.config import TileConfig
    from flashsampling.impl.cute.kernel import compile_kernel

def compile_one(out, dtype, shape, features):
    with tempfile.TemporaryDirectory() as scratch:
        options = f"--gpu-arch sm_90a --keep-cubin --dump-dir {scratch}"
        compile_kernel(getattr(cutlass, dtype), TileConfig(*shape), options, **features)
        (cubin,) = Path(scratch).glob("*.cubin")
        return cubin.read_bytes()
"""
_TRITON = """
import runpy
try:
    source = runpy.run_path("tests/kernels/triton/test_compile.py")["COMPILE"]
except FileNotFoundError:  # commits before the tests had these folders
    source = runpy.run_path("tests/test_triton_compile.py")["COMPILE"]

def compile_one(out, *arguments):
    sys.argv[1:] = arguments
    names = {"__name__": "compile"}
    exec(source, names)
    return names["kernel"].asm["ptx"].encode()
"""
_ALL = """
for out, arguments in json.loads(jobs):
    try:
        result = compile_one(out, *arguments)
    except Exception:
        Path(out).with_suffix(".error").write_text(traceback.format_exc())
    else:
        Path(out).write_bytes(result)
"""
_HEAD = "import json, sys, tempfile, traceback\nfrom pathlib import Path\njobs = sys.argv[1]\n"

console = Console(width=120)


@dataclass(frozen=True)
class Kernel:
    """One thing to compile."""

    name: str
    compiler: str  # "cute" or "triton"
    arguments: tuple[Any, ...]  # of ``compile_one``, for JSON

    @property
    def file(self) -> str:
        """The name of the result's file."""
        return re.sub(r"[^\w.]+", "_", self.name) + (".cubin" if self.compiler == "cute" else ".ptx")


def kernels() -> list[Kernel]:
    """All of the working tree's."""
    found = []
    for dtype, element in ("bf16", "BFloat16"), ("fp16", "Float16"):
        for config in CONFIGS:
            name = f"cute {dtype} {config.block_b}" + ("" if config.bound_buffers == 1 else f"/{config.bound_buffers}")
            found.append(Kernel(name, "cute", (element, astuple(config), {})))
    for config in CONFIGS[4], CONFIGS[-1]:
        for feature in "counts_evaluations", "stamps":
            arguments = "BFloat16", astuple(config), {feature: True}
            found.append(Kernel(f"cute bf16 {config.block_b} {feature}", "cute", arguments))
    if importlib.util.find_spec("triton"):
        cases = runpy.run_path(str(ROOT / "tests" / "kernels" / "triton" / "test_compile.py"))["CASES"]
        for capability, dtype, loads, problem, *_ in cases:
            if capability in ARCHITECTURES:
                case = tuple(map(str, (capability, dtype, loads, *problem)))
                found.append(Kernel(f"triton sm_{' '.join(case)}", "triton", case))
    return found


# -- what is compared


def sections(elf: bytes) -> list[tuple[str, bytes]]:
    """Names and contents of the sections of a 64-bit little-endian ELF file; of those without contents, their size."""
    (table,) = struct.unpack_from("<Q", elf, 0x28)
    size, count, names = struct.unpack_from("<HHH", elf, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", elf, table + i * size) for i in range(count)]

    def name(offset: int) -> str:
        start = headers[names][4] + offset
        return elf[start : elf.index(b"\0", start)].decode()

    no_bits = 8
    return [
        (name(header[0]), str(header[5]).encode() if header[1] == no_bits else elf[header[4] : header[4] + header[5]])
        for header in headers
    ]


def code_of_cubin(cubin: bytes) -> list[tuple[str, bytes]]:
    """Returns what a GPU and its loader read of a cubin, in its order: (kind of section, contents)."""
    kinds = re.compile(r"\.(?:text|nv\.info|nv\.shared|nv\.constant\d+)(?=\.|$)")
    return [(kind[0], content) for name, content in sections(cubin) if (kind := kinds.match(name))]


def code_of_ptx(ptx: str) -> list[str]:
    """The lines of some PTX that become instructions or memory, without the names that Python's functions gave."""
    ptx = re.sub(r"/\*.*?\*/", "", ptx, flags=re.DOTALL)
    ptx = re.sub(r"//.*", "", ptx)
    ptx = re.sub(r"^\s*\.section\s+\.debug\w*\s*\{.*?^\s*\}", "", ptx, flags=re.DOTALL | re.MULTILINE)
    for number, name in enumerate(re.findall(r"\.(?:entry|func)\s+(?:\([^)]*\)\s*)?([\w$]+)", ptx)):
        ptx = re.sub(rf"(?<![\w$]){re.escape(name)}(?=\b|_param_)", f"function{number}", ptx)
    of_lines = re.compile(r"\.(?:file|loc)\s|\$L__(?:tmp|func_begin|func_end)\d+:$")
    lines = (" ".join(line.split()) for line in ptx.splitlines())
    return [line for line in lines if line and not of_lines.match(line)]


def disassembler() -> str | None:
    """Path of ``nvdisasm``: Triton brings one."""
    triton = importlib.util.find_spec("triton")
    if triton is not None and triton.origin is not None:
        place = Path(triton.origin).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
        if place.exists():
            return str(place)
    return shutil.which("nvdisasm")


def lines_of(file: Path) -> list[str]:
    """Returns the lines of a compiled kernel that a person reads: SASS (its bytes without a disassembler), or PTX."""
    if file.suffix == ".ptx":
        return code_of_ptx(file.read_text(encoding="utf-8"))
    tool = disassembler()
    if tool is None:
        texts = [content for kind, content in code_of_cubin(file.read_bytes()) if kind == ".text"]
        return [text[at : at + 16].hex() for text in texts for at in range(0, len(text), 16)]
    sass = subprocess.run([tool, "-c", file], capture_output=True, text=True, check=True).stdout
    return [" ".join(line.split()) for line in re.findall(r"^\s*/\*[0-9a-f]+\*/(.*);", sass, re.MULTILINE)]


def same(before: Path, after: Path) -> bool:
    """Returns whether two compiled kernels are equal for a GPU."""
    if before.suffix == ".ptx":
        return code_of_ptx(before.read_text(encoding="utf-8")) == code_of_ptx(after.read_text(encoding="utf-8"))
    return code_of_cubin(before.read_bytes()) == code_of_cubin(after.read_bytes())


def changes(before: list[str], after: list[str]) -> list[str]:
    """Instructions that only one of two has, marked - and +."""
    return [
        line
        for line in difflib.unified_diff(before, after, n=0, lineterm="")
        if not line.startswith(("---", "+++", "@@"))
    ]


# -- compiling


def check_out(commit: str, place: Path) -> None:
    """The files of a commit, into a folder."""
    archive = subprocess.run(
        ["git", "archive", "--format=tar", commit], cwd=ROOT, capture_output=True, check=True
    ).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        files.extractall(place, filter="data")


def compile_some(tree: Path, some: list[Kernel], out: Path) -> None:
    """Compiles kernels of one compiler from a tree, into a folder: each one's file, or with the suffix ".error" why
    not."""
    environment = os.environ | {
        "PYTHONPATH": str(tree),
        "CUTE_DSL_ARCH": "sm_90a",
        "TRITON_INTERPRET": "0",
        "TRITON_CACHE_DIR": str(out / "triton"),
    }
    code = _HEAD + {"cute": _CUTE, "triton": _TRITON}[some[0].compiler] + _ALL
    jobs = json.dumps([(str(out / kernel.file), kernel.arguments) for kernel in some])
    for kernel in some:
        (out / kernel.file).unlink(missing_ok=True)
    run = subprocess.run([sys.executable, "-c", code, jobs], cwd=tree, capture_output=True, text=True, env=environment)
    for kernel in some:
        error = (out / kernel.file).with_suffix(".error")
        if (out / kernel.file).exists():
            error.unlink(missing_ok=True)
        elif not error.exists():  # nothing could be compiled
            error.write_text(run.stderr)


def groups(some: Iterable[Kernel]) -> list[list[Kernel]]:
    """Kernels for one process each."""
    some = list(some)
    apart = [[kernel for kernel in some if kernel.compiler == compiler] for compiler in ("cute", "triton")]
    return [one[at : at + _TOGETHER] for one in apart for at in range(0, len(one), _TOGETHER)]


def full_hash(commit: str) -> str:
    """Returns the full hash of a commit."""
    command = ["git", "rev-parse", "--verify", f"{commit}^{{commit}}"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if run.returncode != 0:
        raise typer.BadParameter(f"{commit!r} is no commit: {run.stderr.strip()}")
    return run.stdout.strip()


def _compilers() -> str:
    distributions = {"cutlass": "nvidia-cutlass-dsl", "triton": "triton"}
    return "-".join(
        importlib.metadata.version(name) for module, name in distributions.items() if importlib.util.find_spec(module)
    )


def main(
    commit: Annotated[str, typer.Argument(help="What the working tree is compared with.")] = "HEAD",
    only: Annotated[
        list[str] | None, typer.Option(help="Kernels with this in their name, as the table has it; repeatable.")
    ] = None,
    workers: Annotated[int, typer.Option(min=1, help="Processes at once.")] = os.cpu_count() or 1,
    show: Annotated[int, typer.Option(min=0, help="Lines to print of what differs in a kernel.")] = 20,
    keep: Annotated[
        Path | None,
        typer.Option(help="A folder for what was compiled. What is there of the commit is not compiled again."),
    ] = None,
) -> None:
    """Compiles the kernels of a commit and of the working tree, and says which differ. The exit status is 1 if one
    does."""
    chosen = [kernel for kernel in kernels() if only is None or any(text in kernel.name for text in only)]
    if not chosen:
        raise typer.BadParameter(f"no kernel has {' or '.join(map(repr, only or []))} in its name")
    with tempfile.TemporaryDirectory() as scratch:
        place = keep.absolute() if keep is not None else Path(scratch)
        hash_ = full_hash(commit)
        before, after, tree = place / f"{hash_}-{_compilers()}", place / "working-tree", Path(scratch) / "commit"
        for folder in before, after:
            folder.mkdir(parents=True, exist_ok=True)
        check_out(hash_, tree)
        missing = [kernel for kernel in chosen if not (before / kernel.file).exists()]
        with ThreadPoolExecutor(workers) as pool, console.status("") as status:
            jobs = [pool.submit(compile_some, tree, some, before) for some in groups(missing)]
            jobs += [pool.submit(compile_some, ROOT, some, after) for some in groups(chosen)]
            for done, job in enumerate(as_completed(jobs)):
                job.result()
                status.update(f"{done + 1} of {len(jobs)} groups of kernels are compiled")
        different = report(chosen, before, after, show, f"{hash_[:7]} and the working tree")
    raise typer.Exit(1 if different else 0)


def report(chosen: list[Kernel], before: Path, after: Path, show: int, title: str) -> int:
    """Prints what is equal and what is not; how many are not."""
    table = Table("kernel", "instructions", "", title=title)
    details = []
    different = 0
    for kernel in chosen:
        files = before / kernel.file, after / kernel.file
        failed = [file for file in files if not file.exists()]
        if not failed and same(*files):
            table.add_row(kernel.name, str(len(lines_of(files[0]))), "equal")
            continue
        different += 1
        if failed:
            where = " and ".join("in the commit" if file.parent == before else "in the working tree" for file in failed)
            table.add_row(kernel.name, "", f"does not compile {where}", style="red")
            details += [(kernel.name, failed[-1].with_suffix(".error").read_text().splitlines()[-show or None :])]
        else:
            old, new = map(lines_of, files)
            changed = changes(old, new)
            counts = " and ".join(f"{sum(line[0] == sign for line in changed)} {sign}" for sign in "-+")
            table.add_row(kernel.name, f"{len(old)}, {len(new)}", f"different: {counts}", style="red")
            details += [(kernel.name, changed[:show])]
    console.print(table)
    for name, lines in details if show else []:
        console.rule(name)
        console.print("\n".join(lines), markup=False, highlight=False)
    console.print(f"{len(chosen) - different} equal, {different} different")
    return different
