"""The machine on which the Hopper kernel runs without a GPU: what is wrong is found; arithmetic, and instructions that
Triton's compiler writes and the Hopper kernel has not, do what PTX says."""

import contextlib
import math
import re
import struct

import numpy as np
import pytest
import torch

from tests import emulator as package

if package.why_not():
    pytest.skip(f"needs the machine: {package.why_not()}", allow_module_level=True)

from flashsampling.inputs import SampleInputs
from flashsampling.kernels.hopper import config
from tests.emulator import hopper, machine
from tests.emulator.machine import Machine, MachineError, settings
from tests.problems import make_problem

INF, NAN = math.inf, math.nan
SPECIAL = [0.0, -0.0, INF, -INF, NAN]
FLOATS = [*SPECIAL, 1.0, -1.5, 3.25e-41, -(2.0**-149), 2.0**-126, 3e38, -3.4028234e38, 0.1, 7.0, -1e-20, 1e20]
DOUBLES = [*SPECIAL, 1.5, -(2.0**-1074), 1e308, 0.1, 2.0**31, -(2.0**31) - 1, 2.0**63, -1e19, 12345.75]
TO_HALVES = [*SPECIAL, 1.0, -1.5, 3.1415927, 65504.0, 65520.0, 1e38, 6e-8, 2.0**-15, 1.00390625, 1.01171875]
INTS = [0, 1, -1, 2, 7, 31, 32, 33, 63, 64, -(2**31), 2**31 - 1, 0x12345678, -0x0FEDCBA9, 255, 65536]
HEADER = """
.version 8.6
.target sm_90a
.address_size 64
.extern .shared .align 1024 .b8 memory[];
.visible .entry kernel(.param .u64 kernel_in, .param .u64 kernel_out) .reqntid THREADS, 1, 1
{
  .reg .pred %p<9>; .reg .b16 %rs<9>; .reg .b32 %r<99>; .reg .b64 %rd<99>;
  mov.u32 %r0, %tid.x;
  ld.param.b64 %rd0, [kernel_in];
  ld.param.b64 %rd1, [kernel_out];
  mul.wide.u32 %rd2, %r0, 16;
  add.s64 %rd3, %rd0, %rd2;
  ld.global.v4.b32 {%r1, %r2, %r3, %r4}, [%rd3];
  mov.b64 %rd5, {%r1, %r2};
  mov.b64 %rd6, {%r3, %r4};
  mul.wide.u32 %rd2, %r0, 8;
  add.s64 %rd4, %rd1, %rd2;
"""
FOOTER = "\n  st.global.b64 [%rd4], %rd9;\n  ret;\n}\n"


def run(code, words):
    """The 64 bits that each thread leaves in %rd9, which begins with %r1 .. %r4 and, of two each, %rd5 and %rd6:
    (threads,)."""
    threads = -(-len(words) // 32) * 32
    return launch(kernel_of(code + FOOTER, threads), threads, words)


def kernel_of(code, threads):
    return Machine(HEADER.replace("THREADS", str(threads)) + code)


def launch(kernel, threads, words=((0, 0, 0, 0),)):
    given = torch.zeros(threads, 4, dtype=torch.int32)
    given[: len(words)] = torch.tensor(np.array(words, np.int64).astype(np.uint32).view(np.int32))
    out = torch.zeros(threads, dtype=torch.int64)
    kernel.launch([struct.pack("q", tensor.data_ptr()) for tensor in (given, out)], 1)
    return out.numpy()[: len(words)]


def bits(x):
    return int(np.float32(x).view(np.uint32))


def pairs(values, to_word=lambda x: x):
    return [(to_word(a), to_word(b), to_word(c), 0) for a in values for b in values for c in (values[2], values[-3])]


@pytest.mark.parametrize(
    ("instruction", "expected"),
    [
        ("add.s32", lambda a, b, c: a + b),
        ("sub.s32", lambda a, b, c: a - b),
        ("mul.lo.s32", lambda a, b, c: a * b),
        ("mul.hi.s32", lambda a, b, c: (a * b) >> 32),
        ("mad.lo.s32", lambda a, b, c: a * b + c),
        ("min.s32", lambda a, b, c: min(a, b)),
        ("max.u32", lambda a, b, c: max(a % 2**32, b % 2**32)),
        ("and.b32", lambda a, b, c: a & b),
        ("xor.b32", lambda a, b, c: a ^ b),
        ("shl.b32", lambda a, b, c: a << (b % 2**32) if b % 2**32 < 32 else 0),
        ("shr.u32", lambda a, b, c: a % 2**32 >> min(b % 2**32, 32)),
        ("shr.s32", lambda a, b, c: a >> min(b % 2**32, 31)),
        ("shf.l.wrap.b32", lambda a, b, c: ((b % 2**32 << 32 | a % 2**32) << c % 32) >> 32),
        ("not.b32", lambda a, b, c: ~a),
        ("neg.s32", lambda a, b, c: -a),
        ("abs.s32", lambda a, b, c: abs(a)),
        ("popc.b32", lambda a, b, c: (a % 2**32).bit_count()),
    ],
)
def test_integers(instruction, expected):
    words = pairs(INTS)
    name = instruction.split(".")[0]
    sources = {"mad": 3, "shf": 3, "not": 1, "neg": 1, "abs": 1, "popc": 1}.get(name, 2)
    operands = ", ".join(["%r1", "%r2", "%r3"][:sources])
    got = run(f"{instruction} %r9, {operands}; cvt.u64.u32 %rd9, %r9;", words)
    assert got.tolist() == [expected(*word[:3]) % 2**32 for word in words]


def as_words(x):
    """Bits of float32, NaN as what arithmetic gives."""
    x = np.asarray(x, np.float32)
    return np.where(np.isnan(x), np.uint32(0x7FFFFFFF), x.view(np.uint32))


@np.errstate(all="ignore")
def test_floats():
    words = pairs(FLOATS, bits)
    a, b = (np.array([word[n] for word in words], np.uint32).view(np.float32) for n in range(2))
    nan = np.isnan(a) | np.isnan(b)
    zeros = (a == 0) & (b == 0)
    least = np.where(zeros, np.where(np.signbit(a) | np.signbit(b), -0.0, 0.0), np.minimum(a, b))
    most = np.where(zeros, np.where(np.signbit(a) & np.signbit(b), -0.0, 0.0), np.maximum(a, b))
    expected = {
        "add.f32 %r9, %r1, %r2;": a + b,
        "add.rn.f32 %r9, %r1, %r2;": a + b,
        "sub.rn.f32 %r9, %r1, %r2;": a - b,
        "mul.f32 %r9, %r1, %r2;": a * b,
        "div.rn.f32 %r9, %r1, %r2;": a / b,
        "neg.f32 %r9, %r1; add.f32 %r9, %r9, %r2;": b - a,
        "abs.f32 %r9, %r1; mul.f32 %r9, %r9, 0f3F800000;": np.abs(a),
        "min.f32 %r9, %r1, %r2;": np.where(np.isnan(a), b, np.where(np.isnan(b), a, least)),
        "max.NaN.f32 %r9, %r1, %r2;": most,
        "cvt.rn.f32.u32 %r9, %r1;": a.view(np.uint32).astype(np.float64).astype(np.float32),
    }  # fmt: skip
    for code, values in expected.items():
        got = run(code + " cvt.u64.u32 %rd9, %r9;", words)
        assert np.array_equal(got.astype(np.uint32), as_words(values)), code
    near_one = bits(1 + 2.0**-12), bits(1 + 2.0**-12), bits(-(1 + 2.0**-11)), 0
    assert run("fma.rn.f32 %r9, %r1, %r2, %r3; cvt.u64.u32 %rd9, %r9;", [near_one])[0] == bits(2.0**-24)  # rounded once
    for how, values in {
        "eq": a == b, "ne": (a != b) & ~nan, "lt": a < b, "ge": a >= b, "equ": (a == b) | nan, "neu": (a != b) | nan,
        "ltu": (a < b) | nan, "geu": (a >= b) | nan, "leu": (a <= b) | nan, "num": ~nan, "nan": nan,
    }.items():  # fmt: skip
        got = run(f"setp.{how}.f32 %p1, %r1, %r2; selp.b64 %rd9, 1, 0, %p1;", words)
        assert np.array_equal(got != 0, values), how


def test_fields_of_bits():
    fields = [(x, first, many, 0) for x in INTS for first in (0, 1, 7, 31, 32, 200) for many in (0, 1, 5, 31, 32, 255)]

    def unsigned(x, first, many):
        return (x % 2**32 >> first) & (2**many - 1)

    def signed(x, first, many):
        if not many or first >= 32:
            return -int(x < 0) if many else 0
        field = (x >> first) & (2**many - 1)
        return field - 2**many if field >> (many - 1) else field

    for kind, expected in {"u32": unsigned, "s32": signed}.items():
        got = run(f"bfe.{kind} %r9, %r1, %r2, %r3; cvt.u64.u32 %rd9, %r9;", fields)
        assert got.tolist() == [expected(*field[:3]) % 2**32 for field in fields]


@np.errstate(all="ignore")
def test_doubles():
    pairs_of = [(a, b) for a in DOUBLES for b in DOUBLES]
    words = [
        tuple(int(word) for pair in np.array(ab).view(np.uint32).reshape(2, 2) for word in pair) for ab in pairs_of
    ]
    a, b = np.array(pairs_of).T
    for code, expected in {
        "add.f64 %rd9, %rd5, %rd6;": a + b,
        "sub.f64 %rd9, %rd5, %rd6;": a - b,
        "mul.f64 %rd9, %rd5, %rd6;": a * b,
        "div.rn.f64 %rd9, %rd5, %rd6;": a / b,
        "abs.f64 %rd9, %rd5;": np.abs(a),
        "cvt.rn.f32.f64 %r9, %rd5; cvt.f64.f32 %rd9, %r9;": a.astype(np.float32).astype(np.float64),
        "cvt.rn.f64.s64 %rd9, %rd5;": a.view(np.int64).astype(np.float64),
    }.items():
        got = run(code, words).view(np.float64)
        assert np.array_equal(got, expected, equal_nan=True), code
        assert np.array_equal(np.signbit(got)[~np.isnan(got)], np.signbit(expected)[~np.isnan(got)]), code
    for bits_of, kind in ((32, "s32"), (64, "s64")):
        widen = "cvt.s64.s32 %rd9, %r9;" if kind == "s32" else ""
        got = run(f"cvt.rzi.{kind}.f64 {'%r9' if kind == 's32' else '%rd9'}, %rd5; {widen}", words)
        most = 2 ** (bits_of - 1)
        exact = [0 if x != x else most - 1 if x >= most else -most if x < -most else int(x) for x in a]
        assert got.tolist() == exact
    for how, expected in {"lt": a < b, "geu": ~(a < b), "eq": a == b, "neu": a != b}.items():
        got = run(f"setp.{how}.f64 %p1, %rd5, %rd6; selp.b64 %rd9, 1, 0, %p1;", words)
        assert np.array_equal(got != 0, expected), how


@np.errstate(all="ignore")
def test_approximate_floats(monkeypatch):
    """Flushed to zero, and within half a unit in the last place, or some more where that is asked for."""
    words = [(bits(x), 0, 0, 0) for x in [*FLOATS, *np.linspace(-130, 130, 200)]]
    x = np.array([word[0] for word in words], np.uint32).view(np.float32)
    flushed = np.where(np.abs(x) < 2.0**-126, np.copysign(0.0, x), x).astype(np.float64)
    for name, exact in {"ex2": np.exp2(flushed), "lg2": np.log2(flushed), "rcp": 1 / flushed}.items():
        exact = np.where(np.abs(exact) < 2.0**-126, 0.0, exact)
        code = f"{name}.approx.ftz.f32 %r9, %r1; cvt.u64.u32 %rd9, %r9;"
        got = run(code, words).astype(np.uint32).view(np.float32)
        np.testing.assert_allclose(got, exact.astype(np.float32), rtol=1e-7)
        with monkeypatch.context() as patched:
            patched.setattr(settings, "sloppy", 2)
            sloppy = run(code, words).astype(np.uint32).view(np.float32)
        np.testing.assert_allclose(sloppy, exact.astype(np.float32), rtol=3e-7)
        assert (sloppy != got).mean() > 0.3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_pairs_are_compared_half_by_half(dtype):
    values = torch.tensor([0.0, -0.0, 1.5, -1.5, INF, NAN, 2.0**-14], dtype=dtype)
    a, b = (side.flatten() for side in torch.meshgrid(values, values, indexing="ij"))
    packed = [(x.view(torch.int16).int() & 0xFFFF) | y.view(torch.int16).int() << 16 for x, y in ((a, b), (b, a))]
    words = torch.stack([*packed, *packed], dim=1).tolist()
    kind = "bf16x2" if dtype == torch.bfloat16 else "f16x2"
    for how, expected in {"eq": a == b, "neu": a != b, "nan": a.isnan() | b.isnan(), "lt": a < b}.items():
        both = "selp.b32 %r8, 1, 0, %p1; selp.b32 %r9, 1, 0, %p2; mov.b64 %rd9, {%r8, %r9};"
        got = torch.tensor(run(f"setp.{how}.{kind} %p1|%p2, %r1, %r2; {both}", words))
        upper = {"lt": b < a}.get(how, expected)
        assert torch.equal(got & 1 != 0, expected), how
        assert torch.equal(got >> 32 != 0, upper), how
        lower = "cvt.u16.u32 %rs1, %r1; cvt.u16.u32 %rs2, %r2; mov.pred %p2, 0;"
        got = torch.tensor(run(f"{lower} setp.{how}.{kind[:-2]} %p1, %rs1, %rs2; {both}", words))
        assert torch.equal(got & 1 != 0, expected), how
    assert run("add.s16x2 %r9, %r1, %r2; cvt.u64.u32 %rd9, %r9;", [(0x7FFFFFFF, 0x00010001, 0, 0)])[0] == 0x80000000


@pytest.mark.parametrize(("dtype", "kind"), [(torch.bfloat16, "bf16"), (torch.float16, "f16")])
def test_halves_are_converted(dtype, kind):
    words = [(bits(x), 0, 0, 0) for x in TO_HALVES]
    got = run(f"cvt.rn.{kind}.f32 %rs1, %r1; cvt.u64.u16 %rd9, %rs1;", words)
    halves = torch.tensor(TO_HALVES).to(dtype)
    expected = torch.where(halves.isnan(), 0x7FFF, halves.view(torch.int16).int() & 0xFFFF)
    assert got.tolist() == expected.tolist()
    words = [(word, 0, 0, 0) for word in expected.tolist()]
    got = run(f"cvt.u16.u32 %rs1, %r1; cvt.f32.{kind} %r9, %rs1; cvt.u64.u32 %rd9, %r9;", words)
    found = got.astype(np.uint32).view(np.float32)
    assert np.array_equal(found, halves.float().numpy(), equal_nan=True)


def test_instructions_are_counted():
    """Of every warp, by threads: those that leave some out count for less."""
    kernel = kernel_of("setp.ge.u32 %p1, %r0, 8; @%p1 bra END; neg.s32 %r1, %r1; END:" + FOOTER, 64)
    for _ in range(2):
        launch(kernel, 64)
        assert kernel.executed == [14 + 8 / 32, 14]


def test_copies_of_a_thread():
    """To shared memory: there when their group is waited for, zeros behind what is read; and loads of matrices."""
    code = """
        mov.b32 %r20, memory; shl.b32 %r21, %r0, 4; add.s32 %r21, %r21, %r20; add.s32 %r22, %r21, 1024;
        cp.async.cg.shared.global [%r21], [%rd3], 16;
        cp.async.commit_group;
        cp.async.ca.shared.global [%r22], [%rd3], 16, 8;
        cp.async.commit_group;
        cp.async.wait_group 1;
        bar.sync 0;
        ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r5, %r6, %r7, %r8}, [%r21];
        cp.async.wait_group 0;
        ld.shared.v4.b32 {%r10, %r11, %r12, %r13}, [%r22];
        or.b32 %r12, %r12, %r13; xor.b32 %r12, %r12, %r11; mov.b64 %rd9, {%r6, %r12};
    """
    words = [(4 * n, 4 * n + 1, 4 * n + 2, 4 * n + 3) for n in range(32)]
    got = run(code, words)
    flat = np.array(words).reshape(-1)
    expected = [flat[4 * (8 + n // 4) + n % 4] | (4 * n + 1) << 32 for n in range(32)]
    assert got.tolist() == expected


# -- what is wrong is found


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
        run(code, [(0, 0, 0, 0)] * 32)


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


FUNCTIONS = """
.func (.param .b64 func_retval0) larger(.param .b32 larger_param_0, .param .b32 larger_param_1);
.func (.param .b64 func_retval0) larger(
  .param .b32 larger_param_0,
  .param .b32 larger_param_1
)
{
  .reg .pred %p<3>; .reg .b16 %rs<2>; .reg .b32 %r<4>; .reg .b64 %rd<3>;
  ld.param.b32 %r1, [larger_param_0];
  ld.param.b8 %rs1, [larger_param_1];
  cvt.u32.u16 %r2, %rs1;
  cvt.u64.u32 %rd1, %r1;
  setp.gt.u32 %p1, %r1, %r2;
  @%p1 bra $L__BB0_2;
  cvt.u64.u32 %rd1, %r2;
$L__BB0_2:
  st.param.b64 [func_retval0], %rd1;
  ret;
}
.func store(.param .b64 store_param_0, .param .b32 store_param_1)
{
  .reg .pred %p<2>; .reg .b32 %r<3>; .reg .b64 %rd<3>;
  ld.param.b64 %rd1, [store_param_0];
  ld.param.b32 %r1, [store_param_1];
  setp.eq.u32 %p1, %r1, 7;
  @%p1 ret;
  { .reg .b64 tmp; cvt.u64.u32 tmp, %r1; st.global.b64 [%rd1], tmp; }
  ret;
}
"""


def call_of(name, given, returned=""):
    """As Triton's compiler writes it."""
    lines = [f".param .b{bits} param{i};\n" for i, (bits, _) in enumerate(given)]
    lines += [f"st.param.b{bits} [param{i}], {value};\n" for i, (bits, value) in enumerate(given)]
    names = "(\n" + ",\n".join(f"param{i}" for i in range(len(given))) + "\n)"
    if not returned:
        return "{ " + "".join(lines) + f"call.uni {name}, {names};\n }}\n"
    lines.append(".param .b64 retval0;\n")
    return "{ " + "".join(lines) + f"call.uni (retval0), {name}, {names};\nld.param.b64 {returned}, [retval0];\n }}\n"


def test_calls(monkeypatch):
    """Functions of which each call has registers and labels of its own."""
    monkeypatch.setitem(globals(), "HEADER", HEADER.replace(".visible", FUNCTIONS + ".visible"))
    larger = call_of("larger", [(32, "%r1"), (32, "%r2")], "%rd7") + call_of(
        "larger", [(32, "%r3"), (32, "%r2")], "%rd8"
    )
    words = [(5, 300, 9, 0), (300, 7, 2, 0), (0, 0, 0, 0), (255, 511, 254, 0)]
    wanted = [(max(a, b % 256) << 32) + max(c, b % 256) for a, b, c, _ in words]
    assert run(larger + "shl.b64 %rd7, %rd7, 32; add.s64 %rd9, %rd7, %rd8;", words).tolist() == wanted
    stored = call_of("store", [(64, "%rd4"), (32, "%r1")]) + "ld.global.b64 %rd9, [%rd4];"
    assert run(stored, [(5, 0, 0, 0), (7, 0, 0, 0), (9, 0, 0, 0)]).tolist() == [5, 0, 9]  # one returns before it stores
    with pytest.raises(KeyError):
        run(call_of("nobody", [(32, "%r1")]), words)


@pytest.mark.parametrize(
    "code", ["mystery.b32 %r9, %r1;", "add.rz.f32 %r9, %r1, %r2;", "@%p1 bar.sync 0;", "mov.b32 %r9, nobody;"]
)
def test_what_is_not_known_is_refused(code):
    with pytest.raises(AssertionError):
        run(code, [(0, 0, 0, 0)])


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


def test_memory_is_that_of_tensors_whoever_holds_them():
    a, b = torch.zeros(10), torch.zeros(7)[2:]
    ranges = machine._ranges([a, b, a[3:]])
    assert len(ranges) == 2
    assert (a.data_ptr(), a.data_ptr() + 40) in ranges
    assert (b.data_ptr() - 8, b.data_ptr() + 20) in ranges
