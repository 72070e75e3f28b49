"""The machine on which the Hopper kernel runs without a GPU finds what is wrong."""

import contextlib
import re
import struct

import pytest
import torch

from tests import emulator as package

if package.why_not():
    pytest.skip(f"needs the machine: {package.why_not()}", allow_module_level=True)

from flashsampling.inputs import SampleInputs
from flashsampling.kernels.hopper import config
from tests.emulator import hopper
from tests.emulator.machine import Machine, MachineError, settings
from tests.problems import make_problem

HEADER = """
.version 8.6
.target sm_90a
.address_size 64
.extern .shared .align 1024 .b8 memory[];
.visible .entry kernel(.param .u64 kernel_out) .reqntid THREADS, 1, 1
{
  .reg .pred %p<9>; .reg .b32 %r<99>; .reg .b64 %rd<99>;
  mov.u32 %r0, %tid.x;
  ld.param.b64 %rd1, [kernel_out];
  mul.wide.u32 %rd2, %r0, 8;
  add.s64 %rd4, %rd1, %rd2;
"""
FOOTER = "\n  st.global.b64 [%rd4], %rd9;\n  ret;\n}\n"


def kernel_of(code, threads):
    return Machine(HEADER.replace("THREADS", str(threads)) + code)


def launch(kernel, threads):
    out = torch.zeros(threads, dtype=torch.int64)
    kernel.launch([struct.pack("q", out.data_ptr())], 1)


def run(code):
    """A launch of one warp whose threads each leave %rd9 in memory."""
    launch(kernel_of(code + FOOTER, 32), 32)


def test_instructions_are_counted():
    """Of every warp, by threads: those that leave some out count for less."""
    kernel = kernel_of("setp.ge.u32 %p1, %r0, 8; @%p1 bra END; neg.s32 %r1, %r1; END:" + FOOTER, 64)
    for _ in range(2):
        launch(kernel, 64)
        assert kernel.executed == [8 + 8 / 32, 8]


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("add.s64 %rd4, %rd4, 0x10000;", "global memory of no tensor: 8 bytes .* line"),
        ("add.s64 %rd4, %rd4, 4;", "global memory, not aligned"),
        ("mov.b32 %r20, 0x40000; ld.shared.b32 %r21, [%r20];", "shared memory: 4 bytes at 0x40000"),
        ("bar.sync 1, 64;", r"no end after \d+ rounds; warps: 0\.0 at line"),
        ("bar.sync 1, 16;", "more arrive at a named barrier than 16"),
        ("mov.b32 %r20, memory; mbarrier.init.shared.b64 [%r20], 1; "
         "mbarrier.arrive.shared.b64 _, [%r20]; bar.warp.sync -1;"
         "mov.b32 %r21, 3; mbarrier.arrive.shared.b64 _, [%r20], %r21;", "more arrive at a barrier than 1"),
    ],
)  # fmt: skip
def test_errors(code, error, monkeypatch):
    monkeypatch.setattr(settings, "rounds", 10_000)
    with pytest.raises(MachineError, match=error):
        run(code)


RACES = {  # code of 64 threads, of two warps; whether nothing orders two accesses
    "a store, and a load behind a barrier": (
        "st.shared.b32 [%r20], %r0; bar.sync 0; ld.shared.b32 %r9, [%r21];",
        False,
    ),
    "a store and a load of different warps": (
        "st.shared.b32 [%r20], %r0; bar.warp.sync -1; ld.shared.b32 %r9, [%r21];",
        True,
    ),
    "a load, and a store behind a barrier": (
        "ld.shared.b32 %r9, [%r21]; bar.sync 0; st.shared.b32 [%r20], %r0;",
        False,
    ),
    "a load and a store": ("ld.shared.b32 %r9, [%r21]; st.shared.b32 [%r20], %r0;", True),
    "stores of different values": ("st.shared.b32 [%r22], %r0;", True),
    "stores of one value": ("st.shared.b32 [%r22], 7; st.shared.b32 [%r22], 7;", False),
    "bytes beside each other": ("st.shared.b8 [%r23], %r0;", False),
    "a byte and the word that it is in": ("st.shared.b8 [%r23], %r0; ld.shared.b32 %r9, [%r24];", True),
    "atomics": ("atom.shared.cta.add.u32 %r9, [%r22], 1;", False),
    "a load beside atomics": ("atom.shared.cta.add.u32 %r9, [%r22], 1; ld.shared.b32 %r9, [%r22];", False),
    "a store beside atomics": ("atom.shared.cta.add.u32 %r9, [%r22], 1; st.shared.b32 [%r22], %r0;", True),
    "threads of a warp": ("st.shared.b32 [%r20], %r0; bar.warp.sync -1; ld.shared.b32 %r9, [%r25];", False),
    "threads of a warp that do not meet": ("st.shared.b32 [%r20], %r0; ld.shared.b32 %r9, [%r25];", True),
    "global memory": ("st.global.b32 [%rd1], %r0;", True),
    "an mbarrier": (
        "@%p2 bra READER; st.shared.b32 [%r20], %r0; mbarrier.arrive.shared.b64 %rd9, [%r26]; bra END;"
        "READER: mbarrier.try_wait.parity.shared.b64 %p4, [%r26], 0; @!%p4 bra READER; ld.shared.b32 %r9, [%r21]; END:",
        False,
    ),
}
FLAG = (
    "@%p2 bra READER; @%p1 bra END; st.global.b32 [%rd1], 5; {} bra END;"
    "READER: {} setp.eq.b32 %p4, %r9, 0; @%p4 bra READER; {} ld.global.b32 %r8, [%rd1]; END:"
)
FENCE, RELAXED_STORE, RELAXED_LOAD = (
    "fence.acq_rel.gpu;",
    "st.relaxed.gpu.global.b32 [%rd8], 1;",
    "ld.relaxed.gpu.global.b32 %r9, [%rd8];",
)
RELEASE, ACQUIRE = "st.release.gpu.global.b32 [%rd8], 1;", "ld.acquire.gpu.global.b32 %r9, [%rd8];"
CHAIN = (
    "red.release.gpu.global.add.u64 [%rd8], 1;",
    "atom.global.acq_rel.add.u64 %rd9, [%rd8], 0; cvt.u32.u64 %r9, %rd9;",
)
RACES |= {
    "a flag, released and acquired": (FLAG.format(RELEASE, ACQUIRE, ""), False),
    "a flag that is relaxed": (FLAG.format(RELAXED_STORE, RELAXED_LOAD, ""), True),
    "a flag, released and not acquired": (FLAG.format(RELEASE, RELAXED_LOAD, ""), True),
    "a flag, acquired and not released": (FLAG.format(RELAXED_STORE, ACQUIRE, ""), True),
    "a flag between fences": (FLAG.format(FENCE + RELAXED_STORE, RELAXED_LOAD, FENCE), False),
    "a flag behind one fence": (FLAG.format(FENCE + RELAXED_STORE, RELAXED_LOAD, ""), True),
    "a flag before one fence": (FLAG.format(RELAXED_STORE, RELAXED_LOAD, FENCE), True),
    "a counter": (FLAG.format(*CHAIN, ""), False),
}


@pytest.mark.parametrize("what", RACES)
def test_races(what, monkeypatch):
    """Found in any order in which they may run."""
    code, racing = RACES[what]
    places = """
        mov.b32 %r22, memory; shl.b32 %r20, %r0, 2; add.s32 %r20, %r20, %r22; add.s32 %r20, %r20, 64;
        xor.b32 %r21, %r0, 32; shl.b32 %r21, %r21, 2; add.s32 %r21, %r21, %r22; add.s32 %r21, %r21, 64;
        xor.b32 %r25, %r0, 1; shl.b32 %r25, %r25, 2; add.s32 %r25, %r25, %r22; add.s32 %r25, %r25, 64;
        add.s32 %r23, %r22, %r0; and.b32 %r24, %r23, 0xFFFFFFFC; add.s32 %r26, %r22, 1024; add.s64 %rd8, %rd1, 256;
        setp.ge.u32 %p2, %r0, 32; setp.ne.b32 %p1, %r0, 0; @!%p1 mbarrier.init.shared.b64 [%r26], 32; bar.sync 0;
    """
    kernel = kernel_of(places + code + "\n  ret;\n}\n", 64)
    monkeypatch.setattr(settings, "watches", True)
    for seed in range(5):
        monkeypatch.setattr(settings, "seed", seed)
        where = r"thread \d+ of CTA 0 at line \d+"
        message = f"a race at .*: a (load|store) by {where}, and before it .* by {where}"
        with pytest.raises(MachineError, match=message) if racing else contextlib.nullcontext():
            launch(kernel, 64)


@pytest.mark.parametrize(
    "code", ["mystery.b32 %r9, %r1;", "add.rz.f32 %r9, %r1, %r2;", "@%p1 bar.sync 0;", "mov.b32 %r9, nobody;"]
)
def test_what_is_not_known_is_refused(code):
    with pytest.raises(AssertionError):
        run(code)


@pytest.fixture(scope="module")
def shape():
    return config.TileConfig(8, 1)


@pytest.fixture(scope="module")
def ptx(shape):
    return hopper.compiled(torch.bfloat16, shape, config.KINDS["plain"], "ptx").read_text()


MUTATIONS = {
    "a stage is released before its products have read it": (
        r"wgmma\.wait_group\.sync\.aligned\s+1;",
        "wgmma.wait_group.sync.aligned 9;",
    ),
    "a stage is full with its first copy": (
        r"(mbarrier\.arrive\.expect_tx\.shared\.b64 \S+ \[\S+\]), %r\d+;",
        r"\1, 16384;",
    ),
    "nobody waits until a stage is empty": (
        r"mbarrier\.try_wait\.parity\.shared\.b64 P1, \[%r\d+\], %r\d+, 10000000;\s+@P1 bra\.uni DONE;",
        "bra.uni DONE;",
    ),
}


@pytest.mark.quick(1)
@pytest.mark.parametrize("what", [None, *MUTATIONS])
def test_a_wrong_pipeline_is_found(what, ptx, shape, monkeypatch):
    """The kernel itself is right in as many orders."""
    problem = make_problem(8, 200, 1000, torch.device("cpu"), torch.bfloat16)
    expected = problem.sample("reference")[:, 0]
    if what is not None:
        ptx, many = re.subn(*MUTATIONS[what], ptx)
        assert many
    kernel = hopper.HopperKernel(ptx, shape)
    wrong = any(not torch.equal(draw(kernel, problem.step(), seed, monkeypatch), expected) for seed in range(20))
    assert wrong == (what is not None)


def draw(kernel, step: SampleInputs, seed, monkeypatch):
    """Tokens, or none if that fails."""
    from flashsampling.kernels.hopper import launch

    monkeypatch.setattr(settings, "seed", 1000 * seed)
    monkeypatch.setattr(settings, "rounds", 200_000)
    monkeypatch.setattr(launch, "kernel_for", lambda *_: kernel)
    launch._plan.cache_clear()
    try:
        return launch.run(step).ids
    except MachineError:
        return torch.empty(0, dtype=torch.int64)
    finally:
        launch._plan.cache_clear()
