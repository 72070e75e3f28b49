"""Capability exchange: facts that ranks exchange when they make a group, and choices that all ranks derive alike."""

import itertools
import platform
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..backends import BACKENDS
from ..inputs import example

TRANSPORTS = ("p2p", "nccl", "gloo")
_MAX_P2P_RANKS = 72  # one NVLink domain
MAX_TIMEOUT = 1e9  # seconds, whose nanoseconds are an int64


@dataclass(frozen=True)
class RankCapabilities:
    """The facts that a rank tells its peers when a group is made."""

    shape: tuple[int, ...]
    dtype: str
    device: str
    gpu: str  # its UUID
    no_peers: tuple[str, ...]  # UUIDs of visible GPUs whose memory this rank's GPU cannot map
    host: str
    first_token: int | None
    vocab_size: int | None
    max_batch_size: int
    max_num_samples: int
    transport: str | None
    impl: str | None
    timeout: float
    backends: str  # of the process group
    cannot: dict[str, str]  # backends that cannot do this shard -> the reason


def rank_capabilities(weight: Tensor, seconds: float, backends: str, **options: Any) -> RankCapabilities:
    """Returns this rank's capabilities."""
    return RankCapabilities(
        shape=tuple(weight.shape),
        dtype=str(weight.dtype),
        device=weight.device.type,
        gpu=_gpu(weight.device),
        no_peers=_unreachable(weight.device),
        host=_host(),
        timeout=seconds,
        backends=backends,
        cannot=_cannot(weight),
        **options,
    )


def _host() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return f"{platform.node()} {socket.gethostname()}"


def _gpu(device: torch.device) -> str:
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""


def _unreachable(device: torch.device) -> tuple[str, ...]:
    if device.type != "cuda":
        return ()
    others = [torch.device("cuda", i) for i in range(torch.cuda.device_count()) if i != device.index]
    return tuple(_gpu(other) for other in others if not torch.cuda.can_device_access_peer(device, other))


def _cannot(weight: Tensor) -> dict[str, str]:
    """Returns the backends that cannot do this shard, with the reason."""
    if weight.dim() != 2 or weight.shape[1] < 1:
        return {}  # ``check`` raises a better error
    # kernels read the hidden states in place of an empty shard
    step = example(weight if weight.shape[0] else weight.new_empty((1, weight.shape[1])))
    reasons = {backend.name: backend.unsupported(step) for backend in BACKENDS.values() if backend.sharded}
    return {name: reason for name, reason in reasons.items() if reason is not None}


def check(members: Sequence[RankCapabilities]) -> list[tuple[int, int]]:
    """Checks that the ranks fit together. Raises the same on every rank.

    Returns:
        The ranks' token ranges [first, last), cut at the real vocabulary size.
    """
    for rank, member in enumerate(members):
        if len(member.shape) != 2 or member.shape[1] < 1:
            raise ValueError(f"weight must have shape (V_shard, D), got {member.shape} on rank {rank}")
        if member.dtype not in ("torch.bfloat16", "torch.float16", "torch.float32"):
            raise ValueError(f"weight must be bfloat16, float16 or float32, got {member.dtype} on rank {rank}")
    dims = [member.shape[1] for member in members]
    if len(set(dims)) > 1:
        raise ValueError(f"weight must have the same D on all ranks, got {by_rank(dims)}")
    for name in ("dtype", "device", "vocab_size", "max_batch_size", "max_num_samples", "transport", "impl", "timeout"):
        values = [getattr(member, name) for member in members]
        if any(value != values[0] for value in values):
            raise ValueError(f"{name} must be the same on all ranks, got {by_rank(values)}")
    one = members[0]
    for name in ("max_batch_size", "max_num_samples"):
        if getattr(one, name) < 1:
            raise ValueError(f"{name} must be at least 1, got {getattr(one, name)}")
    if not 0 < one.timeout <= MAX_TIMEOUT:
        raise ValueError(f"timeout must be above 0 and at most {MAX_TIMEOUT:g} s, got {one.timeout}")

    firsts = [member.first_token for member in members]
    if any(first is None for first in firsts) and not all(first is None for first in firsts):
        raise ValueError(f"first_token must be given on all ranks or on none, got {by_rank(firsts)}")
    ranges = []
    end = 0
    for member in members:
        first = end if member.first_token is None else member.first_token
        ranges.append((first, first + member.shape[0]))
        end = ranges[-1][1]
    filled = sorted((first, last) for first, last in ranges if last > first)
    end = 0
    for first, last in filled:
        if first != end:
            what = "overlap" if first < end else "leave a hole"
            where = f"at token {min(first, end)}: {by_rank(ranges)}"
            raise ValueError(f"shards must cover the vocabulary once, these {what} {where}")
        end = last
    if not 1 <= end < 2**31:
        raise ValueError(f"shards must hold from 1 to 2**31 - 1 tokens together, got {end}")
    real = end if one.vocab_size is None else one.vocab_size
    if not 1 <= real <= end:
        raise ValueError(f"vocab_size must be from 1 to the {end} rows of all shards, got {real}")
    return [(min(first, real), min(last, real)) for first, last in ranges]


def by_rank(values: Sequence[Any]) -> str:
    """Lists the ranks' values for a message."""
    return ", ".join(f"rank {rank}: {value}" for rank, value in enumerate(values))


def choose_impl(members: Sequence[RankCapabilities]) -> str:
    """Returns the first backend that every rank can use, or the requested one. Raises the same on every rank."""
    requested = members[0].impl
    names = [backend.name for backend in BACKENDS.values() if backend.sharded]
    if requested is not None and requested not in names:
        raise ValueError(f"impl must be None or one of {', '.join(names)} under tensor parallelism, got {requested!r}")
    if requested is None:
        kind = "cuda" if members[0].device == "cuda" else "cpu"
        names = [name for name in names if kind in BACKENDS[name].chosen_on]
    for name in [requested] if requested else names:
        refused = {rank: member.cannot[name] for rank, member in enumerate(members) if name in member.cannot}
        if not refused:
            return name
    rank, reason = next(iter(refused.items()))
    raise ValueError(f"impl={requested!r} cannot do this on rank {rank}: {reason}")


def choose_transport(
    members: Sequence[RankCapabilities], impl: str, no_p2p: str | None = None
) -> tuple[str, str | None]:
    """Chooses the first usable transport, or the requested one. Raises the same on every rank. ``no_p2p``: the reason
    why an attempt to use p2p failed.

    Returns:
        The transport's name, and the reason why it is not p2p. The reason is None unless p2p was tried, or no transport
        was requested and all ranks are on GPUs of one host.
    """
    requested, device, backends = members[0].transport, members[0].device, members[0].backends
    if requested is not None and requested not in TRANSPORTS:
        raise ValueError(f"transport must be None or one of {', '.join(TRANSPORTS)}, got {requested!r}")
    cannot = {
        "p2p": no_p2p or why_no_p2p(members, impl),
        "nccl": why_no_nccl(members),
        "gloo": None if "gloo" in backends else f"group {backends}",
    }
    names = (requested,) if requested else TRANSPORTS
    for name in names:
        if cannot[name] is None:
            one_host = device == "cuda" and len(members) > 1 and len({member.host for member in members}) == 1
            return name, cannot["p2p"] if one_host and not requested else no_p2p
    reasons = "; ".join(f"{name}: {cannot[name]}" for name in names)
    raise ValueError(f"transport={requested!r} cannot be used ({reasons})")


def why_no_nccl(members: Sequence[RankCapabilities]) -> str | None:
    """Returns the reason why NCCL cannot be used, or None."""
    device, backends = members[0].device, members[0].backends
    return None if device == "cuda" and "nccl" in backends else f"shards on {device}, group {backends}"


def why_no_p2p(members: Sequence[RankCapabilities], impl: str) -> str | None:
    """Returns the reason why p2p cannot be used, or None if it can be tried.

    A process may be able to map the memory of a GPU that it does not see."""
    if members[0].device != "cuda":
        return f"a shard is on {members[0].device}"
    if not BACKENDS[impl].exchanges:
        return f"impl {impl!r} has no kernel that could do the exchange"
    if len(members) > _MAX_P2P_RANKS:
        return f"{len(members)} ranks, it takes up to {_MAX_P2P_RANKS}"
    if len({member.host for member in members}) > 1:
        return "the ranks are on several hosts"
    for (a, one), (b, other) in itertools.permutations(enumerate(members), 2):
        if one.gpu == other.gpu:
            return f"ranks {a} and {b} share a GPU"
        if other.gpu in one.no_peers:
            return f"the GPU of rank {a} cannot map the memory of rank {b}'s"
    return None
