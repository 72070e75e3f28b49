"""What kernels read of their modules."""

import triton.language as tl


class Constant(tl.constexpr):
    """A global that kernels read. At every launch Triton compares all that a kernel reads with copies from when it was
    compiled: 17 to 22 of ours, for each of which ``tl.constexpr`` takes the host 1.3 us (Triton 3.6, CPython 3.11)."""

    def __ne__(self, other):
        return self.value != other.value if type(other) is Constant else super().__ne__(other)
