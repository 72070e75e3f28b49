"""PTX on a CPU: the Hopper kernel, as its compiler leaves it, runs where there is no GPU.

    parse.py      the text of a kernel as instructions, labels and registers
    translate.py  each stretch of instructions between branches as a C function of one thread
    machine.h     what a GPU is to them: warps, barriers, the copy engine, tensor cores, memory, and who runs next
    machine.py    from PTX to launches
    hopper.py     this package's launches by way of that machine

Which warp runs next, in which order threads of a warp that went different ways go on, when a copy arrives and when a
product reads its operands is drawn at random from a seed, within what PTX promises: so a test sees other orders than a
GPU would show, and the same again by the same seed. Threads of a warp meet where an instruction says ``.sync`` and
nowhere else.

What it finds: wrong results, accesses beside memory that belongs to a tensor, shared memory that is given back too
early, barriers that are never reached. What it does not: time, memory orders (there is one memory, and what is written
is there), and what ptxas makes of the PTX. Approximate instructions are exact here but for the last bit.
"""

import importlib.util
import shutil


def why_not() -> str | None:
    """Why the Hopper kernel cannot run here so, or None."""
    missing = [name for name in ("cutlass", "tvm_ffi", "triton", "filelock") if importlib.util.find_spec(name) is None]
    if missing:
        return f"{missing[0]} is not installed"
    return None if shutil.which("gcc") else "there is no gcc"
