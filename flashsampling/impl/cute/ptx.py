"""Instructions for which the DSL has no function."""

from typing import Any

import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint32


def happened(barrier: Uint32, phase: Uint32) -> Uint32:
    """1 once a phase of an mbarrier, at an address in shared memory, is over; 0 if it is not within a microsecond or so."""
    ptx = "{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [{$r0}], {$r1}, 1000; selp.u32 {$w0}, 1, 0, p;}"
    return cute.arch.inline_ptx(ptx, write_only_types=[Uint32], read_only_args=[barrier, phase])


def count(barrier, condition: Boolean) -> Int32:
    """Of a named barrier's threads, which it waits for, those for which a condition holds."""
    ptx = (
        "{.reg .pred p; setp.ne.u32 p, {$r0}, 0; "
        f"bar.red.popc.u32 {{$w0}}, {barrier.barrier_id}, {barrier.num_threads}, p;}}"
    )
    return cute.arch.inline_ptx(ptx, write_only_types=[Int32], read_only_args=[Uint32(condition)])


def sleep(nanoseconds: int) -> None:
    """About so long."""
    cute.arch.inline_ptx("nanosleep.u32 {$r0};", read_only_args=[Uint32(nanoseconds)])


def take_lowest(bits: Uint32) -> tuple:
    """Which bit of some is the lowest, and the others."""
    lowest = cute.arch.popc((bits & (Uint32(0) - bits)) - Uint32(1))
    return lowest, bits & (bits - Uint32(1))


def store_two(address: Int64, first: Int64, second: Int64) -> None:
    """Two words of global memory side by side, at an address of 16 bytes; each arrives whole, in any order."""
    cute.arch.inline_ptx("st.relaxed.sys.global.v2.b64 [{$r0}], {{$r1}, {$r2}};", read_only_args=[address, first, second])


def load_two(address: Int64, order: str) -> tuple:
    """Two words of global memory side by side, at an address of 16 bytes, each "relaxed" or "acquire"."""
    ptx = f"ld.{order}.sys.global.v2.b64 {{{{$w0}}, {{$w1}}}}, [{{$r0}}];"
    return cute.arch.inline_ptx(ptx, write_only_types=[Int64, Int64], read_only_args=[address])


def settled(value: Any) -> Any:
    """The value, worked out here: compilers move what is cheap to where it is used, even into a loop."""
    kind = type(value)
    return cute.arch.inline_ptx(f"mov.b{kind.width} {{$w0}}, {{$r0}};", write_only_types=[kind], read_only_args=[value])
