"""What ranks tell each other when they make a group, and what they conclude from it, all alike."""

import itertools
import platform
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..backends import BACKENDS, tried_on
from ..inputs import example

TRANSPORTS = ("p2p", "nccl", "gloo")
_MAX_P2P_RANKS = 72  # one NVLink domain
MAX_TIMEOUT = 1e9  # seconds, whose nanoseconds are an int64


@dataclass(frozen=True)
class RankCapabilities:
    """What a rank tells the others when a group is made."""

    shape: tuple[int, ...]
    dtype: str
    device: str
    gpu: str  # its UUID
    no_peers: tuple[str, ...]  # UUIDs of the GPUs that this process sees and whose memory its own cannot map
    host: str
    first_token: int | None
    vocab_size: int | None
    max_batch_size: int
    max_num_samples: int
    transport: str | None
    impl: str | None
    timeout: float
    backends: str  # of the process group
    cannot: dict[str, str]  # implementation -> why not here


def rank_capabilities(weight: Tensor, seconds: float, backends: str, **options: Any) -> RankCapabilities:
    """This rank's."""
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
    """Implementations that cannot do this shard, and why."""
    if weight.dim() != 2 or weight.shape[1] < 1:
        return {}  # check says it better
    # an empty shard reads the hidden states instead
    step = example(weight if weight.shape[0] else weight.new_empty((1, weight.shape[1])))
    reasons = {backend.name: backend.unsupported(step) for backend in BACKENDS.values() if backend.sharded}
    return {name: reason for name, reason in reasons.items() if reason is not None}


def check(members: Sequence[RankCapabilities]) -> list[tuple[int, int]]:
    """The ranks' token ranges [first, last), cut at the real vocabulary size. Raises alike on every rank."""
    for rank, rank_capabilities in enumerate(members):
        if len(rank_capabilities.shape) != 2 or rank_capabilities.shape[1] < 1:
            raise ValueError(f"weight must have shape (V_shard, D), got {rank_capabilities.shape} on rank {rank}")
        if rank_capabilities.dtype not in ("torch.bfloat16", "torch.float16", "torch.float32"):
            raise ValueError(
                f"weight must be bfloat16, float16 or float32, got {rank_capabilities.dtype} on rank {rank}"
            )
    dims = [rank_capabilities.shape[1] for rank_capabilities in members]
    if len(set(dims)) > 1:
        raise ValueError(f"weight must have the same D on all ranks, got {by_rank(dims)}")
    for name in ("dtype", "device", "vocab_size", "max_batch_size", "max_num_samples", "transport", "impl", "timeout"):
        values = [getattr(rank_capabilities, name) for rank_capabilities in members]
        if any(value != values[0] for value in values):
            raise ValueError(f"{name} must be the same on all ranks, got {by_rank(values)}")
    one = members[0]
    for name in ("max_batch_size", "max_num_samples"):
        if getattr(one, name) < 1:
            raise ValueError(f"{name} must be at least 1, got {getattr(one, name)}")
    if not 0 < one.timeout <= MAX_TIMEOUT:
        raise ValueError(f"timeout must be above 0 and at most {MAX_TIMEOUT:g} s, got {one.timeout}")

    firsts = [rank_capabilities.first_token for rank_capabilities in members]
    if any(first is None for first in firsts) and not all(first is None for first in firsts):
        raise ValueError(f"first_token must be given on all ranks or on none, got {by_rank(firsts)}")
    ranges = []
    end = 0
    for rank_capabilities in members:
        first = end if rank_capabilities.first_token is None else rank_capabilities.first_token
        ranges.append((first, first + rank_capabilities.shape[0]))
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
    """Values that differ, for a message."""
    return ", ".join(f"rank {rank}: {value}" for rank, value in enumerate(values))


def choose_impl(members: Sequence[RankCapabilities]) -> str:
    """The first implementation that every rank can do, or the one asked for. Raises alike on every rank."""
    params = members[0].impl
    names = [backend.name for backend in BACKENDS.values() if backend.sharded]
    if params is not None and params not in names:
        raise ValueError(f"impl must be None or one of {', '.join(names)} under tensor parallelism, got {params!r}")
    for name in (params,) if params else [backend.name for backend in tried_on(members[0].device) if backend.sharded]:
        refused = {
            rank: rank_capabilities.cannot[name]
            for rank, rank_capabilities in enumerate(members)
            if name in rank_capabilities.cannot
        }
        if not refused:
            return name
    rank, reason = next(iter(refused.items()))
    raise ValueError(f"impl={params!r} cannot do this on rank {rank}: {reason}")


def choose_transport(
    members: Sequence[RankCapabilities], impl: str, no_p2p: str | None = None
) -> tuple[str, str | None]:
    """The first transport that can be, or the one asked for; and why it is not p2p, where users may have expected that: it
    was tried, or all ranks are on one host's GPUs and none was asked for by name. Raises alike on every rank.

    Args:
        members: by rank.
        impl: that was chosen.
        no_p2p: why p2p is out, found out by trying.
    """
    params, device, backends = members[0].transport, members[0].device, members[0].backends
    if params is not None and params not in TRANSPORTS:
        raise ValueError(f"transport must be None or one of {', '.join(TRANSPORTS)}, got {params!r}")
    cannot = {
        "p2p": no_p2p or why_no_p2p(members, impl),
        "nccl": why_no_nccl(members),
        "gloo": None if "gloo" in backends else f"group {backends}",
    }
    for name in (params,) if params else TRANSPORTS:
        if cannot[name] is None:
            on_one = (
                not params
                and device == "cuda"
                and len(members) > 1
                and len({rank_capabilities.host for rank_capabilities in members}) == 1
            )
            return name, cannot["p2p"] if on_one else no_p2p
    reasons = "; ".join(f"{name}: {cannot[name]}" for name in ((params,) if params else TRANSPORTS))
    raise ValueError(f"transport={params!r} cannot be used ({reasons})")


def why_no_nccl(members: Sequence[RankCapabilities]) -> str | None:
    """Why NCCL is out, or None."""
    device, backends = members[0].device, members[0].backends
    return None if device == "cuda" and "nccl" in backends else f"shards on {device}, group {backends}"


def why_no_p2p(members: Sequence[RankCapabilities], impl: str) -> str | None:
    """Why p2p is out before it is tried, or None. A peer's GPU that this process does not see may still be mapped."""
    if members[0].device != "cuda":
        return f"a shard is on {members[0].device}"
    if not BACKENDS[impl].exchanges:
        return f"impl {impl!r} has no kernel that could do the exchange"
    if len(members) > _MAX_P2P_RANKS:
        return f"{len(members)} ranks, it takes up to {_MAX_P2P_RANKS}"
    if len({rank_capabilities.host for rank_capabilities in members}) > 1:
        return "the ranks are on several hosts"
    for (a, one), (b, other) in itertools.permutations(enumerate(members), 2):
        if one.gpu == other.gpu:
            return f"ranks {a} and {b} share a GPU"
        if other.gpu in one.no_peers:
            return f"the GPU of rank {a} cannot map the memory of rank {b}'s"
    return None
