"""What a CUDA device is, asked once."""

import functools

import torch


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Of a CUDA device; Triton's interpreter plays two."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


@functools.cache
def capability(device: torch.device) -> tuple[int, int]:
    """Compute capability of a CUDA device, (major, minor)."""
    return torch.cuda.get_device_capability(device)
