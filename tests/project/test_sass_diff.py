"""What ``scripts/sass-diff`` calls different: an instruction, and no name. Nothing of ours is compiled."""

import subprocess
from pathlib import Path

import pytest

pytest.importorskip("typer")

from flashsampling.kernels.hopper.config import CONFIGS
from scripts import sass_diff

PTX = """
.version 8.0
.target sm_90
.address_size 64
.visible .entry NAME(.param .u64 NAME_param_0) // comment
{
    .reg .b32 %r<3>;
    .reg .b64 %rd<2>;
    .shared .b8 memory[1024];
    .loc 1 7 3
    ld.param.u64 %rd1, [NAME_param_0];
$L__tmp3:
    mov.u32 %r1, %tid.x;
    add.s32 %r2, %r1, 5;
    st.global.b32 [%rd1], %r2;
    ret;
}
.file 1 "/somewhere/SOURCE.py"
.section .debug_info
{
.b32 3
}
"""


def ptx(name="sample_kernel", source="kernel", instruction="add.s32 %r2, %r1, 5;"):
    return PTX.replace("NAME", name).replace("SOURCE", source).replace("add.s32 %r2, %r1, 5;", instruction)


def compare(folder, before, after):
    """Of two cubins or two pieces of PTX, through files."""
    suffix, write = (".ptx", Path.write_text) if isinstance(before, str) else (".cubin", Path.write_bytes)
    files = []
    for place, content in (folder / "before", before), (folder / "after", after):
        place.mkdir(exist_ok=True)
        files.append(place / f"a_kernel{suffix}")
        write(files[-1], content)
    return sass_diff.same(*files)


def test_one_instruction_of_ptx(tmp_path):
    for instruction in "add.s32 %r2, %r1, 6;", "sub.s32 %r2, %r1, 5;", "", "add.s32 %r2, %r1, 5;\n    membar.gl;":
        assert not compare(tmp_path, ptx(), ptx(instruction=instruction))
    before, after = map(sass_diff.code_of_ptx, (ptx(), ptx(instruction="sub.s32 %r2, %r1, 5;")))
    assert sass_diff.changes(before, after) == ["-add.s32 %r2, %r1, 5;", "+sub.s32 %r2, %r1, 5;"]


def test_names_and_lines_of_ptx(tmp_path):
    other = (
        ptx("another_kernel", "somewhere/else")
        .replace(".loc 1 7 3", ".loc 2 9 1")
        .replace("$L__tmp3:", "")
        .replace(".b32 3", "")
    )
    assert compare(tmp_path, ptx(), other)
    assert not compare(tmp_path, ptx(), other.replace("mov.u32 %r1, %tid.x;", "mov.u32 %r1, %tid.y;"))


def test_one_change_of_a_cubin(tmp_path, monkeypatch):
    """What ptxas makes: the same under another name, and different for an instruction or for shared memory."""
    triton = pytest.importorskip("triton")
    ptxas = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
    if not ptxas.exists():
        pytest.skip("needs ptxas")

    def assemble(text):
        source, result = tmp_path / "a.ptx", tmp_path / "a.cubin"
        source.write_text(text.split(".file")[0].replace("    .loc 1 7 3\n", ""))
        subprocess.run([ptxas, "-arch=sm_90", source, "-o", result], check=True)
        return result.read_bytes()

    first, renamed, larger = map(assemble, (ptx(), ptx("another"), ptx().replace("1024", "2048")))
    assert first != renamed
    assert compare(tmp_path, first, renamed)
    assert not compare(tmp_path, first, larger)
    assert not compare(tmp_path, first, assemble(ptx(instruction="add.s32 %r2, %r1, 6;")))
    files = [tmp_path / place / "a_kernel.cubin" for place in ("before", "after")]
    assert [line[0] for line in sass_diff.changes(*map(sass_diff.lines_of, files))] == ["-", "+"]
    monkeypatch.setattr(sass_diff, "disassembler", lambda: None)  # then by its bytes
    assert [line[0] for line in sass_diff.changes(*map(sass_diff.lines_of, files))] == ["-", "+"]


def test_the_report(tmp_path, capsys):
    """Equal, different, and what did not compile; how many are not equal."""
    before, after = tmp_path / "before", tmp_path / "after"
    kernels = [sass_diff.Kernel(f"triton {name}", "triton", ()) for name in ("one", "two", "three")]
    for place in before, after:
        place.mkdir()
        for kernel in kernels[:2]:
            (place / kernel.file).write_text(ptx())
    (before / kernels[2].file).write_text(ptx())
    (after / kernels[2].file).with_suffix(".error").write_text("NameError: undefined")
    (after / kernels[1].file).write_text(ptx(instruction="sub.s32 %r2, %r1, 5;"))
    assert sass_diff.report(kernels, before, after, 20, "") == 2
    out = capsys.readouterr().out
    for text in "1 - and 1 +", "does not compile in the working tree", "NameError: undefined", "+sub.s32 %r2, %r1, 5;":
        assert text in out
    assert sass_diff.report(kernels[:1], before, after, 20, "") == 0


def test_every_shape_and_dtype_is_compared():
    names = [kernel.name for kernel in sass_diff.kernels() if kernel.compiler == "cute"]
    assert len(set(names)) == len(names) == 2 * len(CONFIGS) + 4
    files = [kernel.file for kernel in sass_diff.kernels()]
    assert len(set(files)) == len(files)
