"""Wraps PTX instructions for which the DSL has no function."""

from typing import Any

import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32


def phase_is_over(barrier: Uint32, phase: Uint32) -> Uint32:
    """Returns 1 once a phase of the mbarrier at a shared-memory address is over; 0 if it is not within about a
    microsecond."""
    ptx = "{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [{$r0}], {$r1}, 1000; selp.u32 {$w0}, 1, 0, p;}"
    return cute.arch.inline_ptx(ptx, write_only_types=[Uint32], read_only_args=[barrier, phase])


def barrier_sync(barrier) -> None:
    """Waits at a named barrier, each warp at its own instruction. The DSL's version is aligned, and compute-sanitizer's
    synccheck wants a single one of these in the kernel."""
    cute.arch.inline_ptx(f"barrier.cta.sync {barrier.barrier_id}, {barrier.num_threads};")


def barrier_count(barrier, condition: Boolean) -> Int32:
    """Waits at a named barrier and returns for how many of its threads a condition holds."""
    ptx = (
        "{.reg .pred p; setp.ne.u32 p, {$r0}, 0; "
        f"bar.red.popc.u32 {{$w0}}, {barrier.barrier_id}, {barrier.num_threads}, p;}}"
    )
    return cute.arch.inline_ptx(ptx, write_only_types=[Int32], read_only_args=[Uint32(condition)])


def sleep(nanoseconds: int) -> None:
    """Sleeps for about this long."""
    cute.arch.inline_ptx("nanosleep.u32 {$r0};", read_only_args=[Uint32(nanoseconds)])


def take_lowest(bits: Uint32) -> tuple:
    """Splits bits into the index of the lowest and the others."""
    lowest = cute.arch.popc((bits & (Uint32(0) - bits)) - Uint32(1))
    return lowest, bits & (bits - Uint32(1))


def store_two(address: Int64, first: Int64, second: Int64) -> None:
    """Stores two neighbouring words to global memory, at a multiple of 16 bytes; each arrives whole, in any order."""
    cute.arch.inline_ptx(
        "st.relaxed.sys.global.v2.b64 [{$r0}], {{$r1}, {$r2}};", read_only_args=[address, first, second]
    )


def load_two(address: Int64, order: str) -> tuple:
    """Loads two neighbouring words of global memory, at a multiple of 16 bytes, each "relaxed" or "acquire"."""
    ptx = f"ld.{order}.sys.global.v2.b64 {{{{$w0}}, {{$w1}}}}, [{{$r0}}];"
    return cute.arch.inline_ptx(ptx, write_only_types=[Int64, Int64], read_only_args=[address])


def scheduling_fence(value: Any) -> Any:
    """Returns the value, computed here: compilers move cheap operations to their uses, even into a loop."""
    kind = type(value)
    return cute.arch.inline_ptx(f"mov.b{kind.width} {{$w0}}, {{$r0}};", write_only_types=[kind], read_only_args=[value])


def exp2(x: Any) -> Any:
    """Computes the hardware's exp2: within 2**-22 of it; results below 2**-126 are 0."""
    return cute.arch.inline_ptx("ex2.approx.ftz.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[x])


def store_floats(address: Int64, values: list, places: list[int], left: Int32, least: int) -> None:
    """Stores floats to global memory, each ``places`` bytes behind an address, if ``left`` is greater than
    ``least``."""
    stores = "".join(f"@p st.global.f32 [{{$r1}}+{place}], {{$r{n}}}; " for n, place in enumerate(places, start=2))
    ptx = f"{{.reg .pred p; setp.gt.s32 p, {{$r0}}, {least}; {stores}}}"
    cute.arch.inline_ptx(ptx, read_only_args=[left, address, *values])


def store_four(address: Int64, words: list) -> None:
    """Stores four neighbouring 32-bit words to global memory, at a multiple of 16 bytes."""
    ptx = "st.global.v4.b32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};"
    cute.arch.inline_ptx(ptx, read_only_args=[address, *words])


def launch_dependents() -> None:
    """Lets the next launch begin where space is left, if that launch waits for this one's end itself."""
    cute.arch.inline_ptx("griddepcontrol.launch_dependents;")


def prefetch(address: Int64) -> None:
    """Prefetches global memory to L2."""
    cute.arch.inline_ptx("prefetch.global.L2 [{$r0}];", read_only_args=[address])


def load_if(address: Int64, condition: Boolean) -> Int32:
    """Loads a word of global memory if a condition holds, else 0."""
    ptx = "{.reg .pred p; setp.ne.u32 p, {$r1}, 0; mov.b32 {$w0}, 0; @p ld.global.b32 {$w0}, [{$r0}];}"
    return cute.arch.inline_ptx(ptx, write_only_types=[Int32], read_only_args=[address, Uint32(condition)])


def load_two_if(address: Int64, condition: Boolean) -> tuple:
    """Loads two neighbouring words of global memory, at a multiple of 8 bytes, if a condition holds, else 0."""
    ptx = (
        "{.reg .pred p; setp.ne.u32 p, {$r1}, 0; mov.b32 {$w0}, 0; mov.b32 {$w1}, 0; "
        "@p ld.global.v2.b32 {{$w0}, {$w1}}, [{$r0}];}"
    )
    return cute.arch.inline_ptx(ptx, write_only_types=[Uint32, Uint32], read_only_args=[address, Uint32(condition)])


def _binary(instruction: str, a: Any, b: Any) -> Any:
    ptx = f"{instruction}.f32 {{$w0}}, {{$r0}}, {{$r1}};"
    return cute.arch.inline_ptx(ptx, write_only_types=[Float32], read_only_args=[a, b])


def add(a: Any, b: Any) -> Any:
    """Adds with one rounding, which no compiler fuses with a multiplication."""
    return _binary("add.rn", a, b)


def subtract(a: Any, b: Any) -> Any:
    """Subtracts with one rounding, as ``add``."""
    return _binary("sub.rn", a, b)


def multiply(a: Any, b: Any) -> Any:
    """Multiplies with one rounding, as ``add``."""
    return _binary("mul.rn", a, b)


def divide(a: Any, b: Any) -> Any:
    """Divides within two units in the last place, as Triton does."""
    return _binary("div.full", a, b)
