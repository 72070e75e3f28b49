"""Reads properties of CUDA devices, once per device."""

import functools

import torch


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Returns the number of multiprocessors of a CUDA device; 2 in Triton's interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


@functools.cache
def capability(device: torch.device) -> tuple[int, int]:
    """Returns the compute capability of a CUDA device, (major, minor)."""
    return torch.cuda.get_device_capability(device)
