"""Defines the module constants that kernels read."""

import triton.language as tl


class Constant(tl.constexpr):
    """A global that kernels read, cheap to compare.

    At every launch Triton compares each global of a kernel with its value at compilation. The kernels here have 17 to
    22 globals, and each comparison of a ``tl.constexpr`` costs the host 1.3 us (Triton 3.6, CPython 3.11)."""

    def __ne__(self, other):
        return self.value != other.value if type(other) is Constant else super().__ne__(other)
