"""Points to global memory by address."""

import cutlass.cute as cute
from cutlass import Int64


def global_pointer(dtype, address: Int64):
    """Points to one element of global memory."""
    return cute.make_ptr(dtype, address, cute.AddressSpace.gmem, assumed_align=dtype.width // 8)
