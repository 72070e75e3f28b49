"""Tensor parallelism: the vocabulary is sharded over ranks, every rank draws the same token, and no logits are gathered.

Each rank samples its shard, and the ranks agree on the winner by 8 bytes per row and rank. Three transports carry them, with
the same result:

    p2p     the sampling kernel stores its winners into the peers' symmetric memory and waits for theirs: one launch in all
    nccl    an all-gather after the kernel; across nodes, or where peers cannot map each other's memory
    gloo    point to point through the host: on CPUs

What a winner looks like on the way, and the peer-to-peer protocol with its memory orders, stand in ``exchange``.
"""

import itertools
import math
import platform
import socket
import warnings
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from . import exchange, ops
from .exchange import Shard

TRANSPORTS = ("p2p", "nccl", "gloo")
_IMPLEMENTATIONS = ("cute", "triton", "streaming")  # in the order in which they are tried; p2p needs one of the first two
_MAX_P2P_RANKS = 72  # one NVLink domain

_serial_numbers = itertools.count()
_alive: "weakref.WeakValueDictionary[str, TensorParallel]" = weakref.WeakValueDictionary()


class TensorParallelTimeout(TimeoutError):
    """A rank did not take part in a step in time. The group cannot be used any more.

    Attributes:
        rank: the one that was waited for, in the group.
    """

    def __init__(self, rank: int, message: str) -> None:
        super().__init__(message)
        self.rank = rank


def shard_range(
    vocab: int,
    rank: int,
    world_size: int,
) -> tuple[int, int]:
    """Rows [first, last) of a (vocab, D) LM head that ``shard_lm_head`` gives a rank: even, but in whole blocks of 128 ids.

    The last ranks get less, or nothing. Blocks of 128 are whole Philox groups and whole tiles: no tile is cut in two.
    """
    rows = -(-vocab // (128 * world_size)) * 128
    return min(rank * rows, vocab), min((rank + 1) * rows, vocab)


def shard_lm_head(
    weight: Tensor,  # (V, D)
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """This rank's shard of an LM head, (V_shard, D): a copy, so that the whole weight can be freed. See ``shard_range``.

    Raises:
        ValueError: torch.distributed is not initialised, or this process is not in the group.
    """
    rank, world_size = _rank_and_size(group)
    first, last = shard_range(weight.shape[0], rank, world_size)
    return weight[first:last].clone()


@dataclass(frozen=True)
class _Member:
    """What a rank tells the others when a group is made."""

    shape: tuple[int, int]
    dtype: str
    device: str
    gpu: str  # its UUID
    peers: tuple[str, ...]  # UUIDs of the GPUs whose memory this one can map
    host: str
    first_token: int | None
    vocab_size: int | None
    max_batch_size: int
    max_num_samples: int
    transport: str | None
    impl: str | None
    timeout: float
    serial: int
    cannot: dict[str, str]  # implementation -> why not here


class TensorParallel:
    """A group of ranks that share an LM head by its vocabulary. Making one is a collective call.

    It is made for one weight shard, once; ``sample(..., tp=...)`` and ``LMHeadSampler(..., tp=...)`` then take the same shard.
    All ranks call with the same hidden states and the same parameters per row, in the same order, and all get the same token
    ids: those that one rank with the whole weight would draw (bit for bit with the kernels). Steps of one group follow one
    another, on one stream or ordered by events; two groups may be at work at once. A CUDA graph captured with a group needs it
    open whenever it is replayed.

    Args:
        group: the process group; None is the default one. Sub-groups (tensor parallelism inside data or pipeline parallelism)
            are fine.
        weight: (V_shard, D), this rank's rows of the LM head; V_shard may be 0.
        first_token: token id of the shard's first row. None: shards lie one after the other in the order of the ranks.
        vocab_size: real size of the whole vocabulary where the weight is padded; ids from it on are never sampled.
        max_batch_size: rows of the largest batch; the buffers are made for it.
        max_num_samples: draws per row, at most.
        transport: "p2p", "nccl" or "gloo"; None chooses. A name never falls back.
        impl: "cute", "triton" or "streaming", the same on all ranks; None chooses the first that can do every shard.
        timeout: seconds (or a timedelta) after which a rank that does not answer a step is given up (p2p and gloo; with nccl
            the process group's own time-out holds). A rank may come that much later than the others without harm.

    Attributes:
        rank: this rank in the group.
        world_size: ranks in the group.
        first_token: id of this shard's first token.
        last_token: id after this shard's last token that can be sampled.
        vocab_size: tokens of the whole vocabulary that can be sampled.
        transport: what was chosen.
        impl: what was chosen.

    Raises:
        ValueError: on every rank alike: the ranks disagree (D, dtype, kind of device, sizes, transport, impl, time-out), the
            shards overlap or leave a hole, or what was asked for by name cannot be done; it says which rank and why.
        TypeError: an argument is of the wrong type.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        weight: Tensor,  # (V_shard, D)
        *,
        first_token: int | None = None,
        vocab_size: int | None = None,
        max_batch_size: int = 256,
        max_num_samples: int = 1,
        transport: str | None = None,
        impl: str | None = None,
        timeout: float | timedelta = 60.0,
    ) -> None:
        if not isinstance(weight, Tensor):
            raise TypeError(f"weight must be a torch.Tensor, got {type(weight).__name__}")
        self.rank, self.world_size = _rank_and_size(group)
        self._group = group
        seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else float(timeout)
        mine = _Member(
            shape=tuple(weight.shape),  # type: ignore[arg-type]
            dtype=str(weight.dtype),
            device=weight.device.type,
            gpu=_gpu(weight.device),
            peers=_reachable(weight.device),
            host=_host(),
            first_token=first_token,
            vocab_size=vocab_size,
            max_batch_size=max_batch_size,
            max_num_samples=max_num_samples,
            transport=transport,
            impl=impl,
            timeout=seconds,
            serial=next(_serial_numbers),
            cannot=_cannot(weight),
        )
        members: list[_Member] = [mine] * self.world_size
        if self.world_size > 1:
            dist.all_gather_object(members, mine, group=group)
        ranges = _check(members)
        self.weight_shape, self.dtype, self.device = weight.shape, weight.dtype, weight.device
        self.vocab_size = max(last for _, last in ranges)
        self.first_token, self.last_token = ranges[self.rank]
        self.max_batch_size, self.max_num_samples = max_batch_size, max_num_samples
        self.timeout = seconds
        self.impl = _choose_impl(members)
        self.transport = _choose_transport(members, self.impl, group)

        self._closed = False
        self._failed_rank: int | None = None
        self._tag = max(member.serial for member in members) % 2**16
        capacity = max_batch_size * max_num_samples
        self._peers: PeerMemory | None = None
        self._gathered: Tensor | None = None
        if self.world_size > 1 and self.transport == "p2p":
            self._peers = self._make_peer_memory(members, capacity)
        if self.world_size > 1 and self.transport == "nccl":
            self._gathered = torch.empty(self.world_size * capacity, dtype=torch.int64, device=self.device)
        self.name = str(mine.serial)  # by which the torch operator finds it
        _alive[self.name] = self

    def _make_peer_memory(self, members: Sequence[_Member], capacity: int) -> "PeerMemory | None":
        """None, and another transport with a warning, where memory that should be mapped cannot be (a container without the
        right to, say) and "p2p" was not asked for by name."""
        peers, failure = None, None
        try:
            peers = PeerMemory(self._group, self.device, self.rank, self.world_size, capacity, self.timeout)
        except RuntimeError as error:
            failure = str(error)
        failures: list[str | None] = [failure] * self.world_size
        dist.all_gather_object(failures, failure, group=self._group)
        why = next((f"rank {rank}: {failure}" for rank, failure in enumerate(failures) if failure is not None), None)
        if why is None:
            return peers
        if members[0].transport == "p2p":
            raise ValueError(f"transport='p2p' cannot be used ({why})")
        self.transport = _choose_transport(members, self.impl, self._group, no_p2p=why)
        warnings.warn(f"transport 'p2p' cannot be used ({why}); it is {self.transport!r} instead", RuntimeWarning, stacklevel=3)
        return None

    def check(self) -> None:
        """Waits for the current stream, then raises if a step failed. After graph replays, which cannot raise themselves.

        Raises:
            TensorParallelTimeout: a rank did not take part in a step in time.
        """
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        self.raise_if_unusable()

    def close(self) -> None:
        """Gives the buffers back, once the device is done with them. Not collective; calling it twice is fine. Graphs captured
        with the group must not be replayed after it."""
        if not self._closed:
            self._closed = True
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            self._peers, self._gathered = None, None
            _alive.pop(self.name, None)

    def __enter__(self) -> "TensorParallel":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return (
            f"TensorParallel(rank={self.rank}, world_size={self.world_size}, tokens=[{self.first_token}, {self.last_token}) of "
            f"{self.vocab_size}, transport={self.transport!r}, impl={self.impl!r})"
        )

    def check_call(self, weight: Tensor, batch: int, num_samples: int) -> None:
        """Raises what ``sample`` documents if this group cannot do the call."""
        if weight.shape != self.weight_shape or weight.dtype != self.dtype or weight.device != self.device:
            raise ValueError(
                f"weight must be the shard that tp was made with, {tuple(self.weight_shape)} {self.dtype} on {self.device}, "
                f"got {tuple(weight.shape)} {weight.dtype} on {weight.device}"
            )
        if batch > self.max_batch_size:
            raise ValueError(f"hidden_states must have at most tp.max_batch_size = {self.max_batch_size} rows, got {batch}")
        if num_samples > self.max_num_samples:
            raise ValueError(f"num_samples must be at most tp.max_num_samples = {self.max_num_samples}, got {num_samples}")

    def broadcast(self, tensor: Tensor) -> Tensor:
        """The first rank's values, in place. A collective."""
        if self.world_size > 1:
            values = [tensor.cpu()]
            dist.broadcast_object_list(values, src=_global_rank(self._group, 0), group=self._group)
            tensor.copy_(values[0])
        return tensor

    @property
    def shard(self) -> Shard:
        """What a kernel is told of this rank's part."""
        if self.world_size == 1:
            return Shard(self.first_token)
        return Shard(self.first_token, exchange.PACKED if self._peers is None else self._peers.table_address)

    def finish(self, out: Tensor) -> Tensor:
        """Token ids from what a kernel wrote: (n,) packed winners, or the tokens themselves where it did the exchange."""
        if self.world_size == 1 or self._peers is not None:
            return out
        if self.transport == "nccl":
            assert self._gathered is not None
            gathered = self._gathered[: self.world_size * out.numel()]
            gather_flat(gathered, out, self._group)
            return exchange.tokens_of(gathered.view(self.world_size, -1))
        return exchange.tokens_of(self._exchange_through_host(out.cpu())).to(out.device)

    def _exchange_through_host(self, mine: Tensor) -> Tensor:
        """(ranks, n) packed winners. Point to point rather than all-gather: a rank that is gone can then be named."""
        winners = torch.empty(self.world_size, mine.numel(), dtype=torch.int64)
        winners[self.rank] = mine
        others = [rank for rank in range(self.world_size) if rank != self.rank]
        wait = timedelta(seconds=self.timeout)
        waiting_for = others[0]
        sends, receipts = [], []
        try:
            for waiting_for in others:
                to = _global_rank(self._group, waiting_for)
                sends.append(dist.isend(mine, to, group=self._group, tag=self._tag))
            for waiting_for in others:
                source = _global_rank(self._group, waiting_for)
                receipts.append(dist.irecv(winners[waiting_for], source, group=self._group, tag=self._tag))
            for waiting_for, work in zip(others + others, receipts + sends):  # noqa: B007 (the handler reads it)
                assert work is not None
                work.wait(wait)
        except RuntimeError as error:  # gloo's for a time-out and for a lost connection
            self._failed_rank = waiting_for
            raise self._timeout() from error
        return winners

    def raise_if_unusable(self) -> None:
        """Raises if the group is closed, or if a step failed by now."""
        if self._closed:
            raise ValueError("tp must be open, it has been closed")
        if self._peers is not None and self._failed_rank is None:
            self._failed_rank = self._peers.failed_rank()
        if self._failed_rank is not None:
            raise self._timeout()

    def _timeout(self) -> TensorParallelTimeout:
        assert self._failed_rank is not None
        which = f"rank {self._failed_rank}"
        if self._group is not None:
            which += f" (global rank {_global_rank(self._group, self._failed_rank)})"
        return TensorParallelTimeout(
            self._failed_rank,
            f"{which} did not take part in a step within {self.timeout:g} s, or is gone; rank {self.rank} waited for it. "
            "The group cannot be used any more",
        )


class PeerMemory:
    """A rank's buffers of the peer-to-peer protocol, and the table that tells a kernel where everybody's are.

    Symmetric memory of torch; the ranks must be able to map each other's memory. Making one is a collective call.
    """

    def __init__(
        self, group: dist.ProcessGroup | None, device: torch.device, rank: int, ranks: int, capacity: int, seconds: float
    ) -> None:
        from torch.distributed import _symmetric_memory as symmetric_memory

        self._received = symmetric_memory.empty(2 * ranks * capacity, dtype=torch.int64, device=device).zero_()
        torch.cuda.synchronize(device)
        # collective, so nobody stores before all are zero
        self._handle: Any = symmetric_memory.rendezvous(self._received, group or dist.distributed_c10d._get_default_group())
        self._state = torch.zeros(1 + capacity, dtype=torch.int64, device=device)
        self._failed = torch.zeros(1, dtype=torch.int64, pin_memory=True)
        self._failed_view = self._failed.numpy()  # reading an element of it costs a tenth of reading a tensor's
        addresses = [int(address) for address in self._handle.buffer_ptrs]
        words = [rank, ranks, capacity, int(seconds * 1e9), self._failed.data_ptr(), self._state.data_ptr(), *addresses]
        self._table = torch.tensor(words, dtype=torch.int64, device=device)
        torch.cuda.synchronize(device)
        self.table_address = self._table.data_ptr()

    def failed_rank(self) -> int | None:
        """The rank that a kernel gave up waiting for, if any did."""
        return int(self._failed_view[0]) - 1 if self._failed_view[0] else None


def gather_flat(gathered: Tensor, mine: Tensor, group: dist.ProcessGroup | None = None) -> None:
    """All-gather of contiguous tensors of one size on all ranks, one after the other into ``gathered``."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # the name before torch 2.13
    gather(gathered.view(-1), mine.view(-1), group=group)


def find(name: str) -> TensorParallel:
    """The group that the torch operator was called with."""
    try:
        return _alive[name]
    except KeyError:
        raise ValueError("tp must be open, it has been closed") from None


def _rank_and_size(group: dist.ProcessGroup | None) -> tuple[int, int]:
    if not (dist.is_available() and dist.is_initialized()):
        raise ValueError("torch.distributed must be initialised (torch.distributed.init_process_group)")
    rank = dist.get_rank(group)
    if rank < 0:
        raise ValueError("group must contain this process")
    return rank, dist.get_world_size(group)


def _global_rank(group: dist.ProcessGroup | None, rank: int) -> int:
    return rank if group is None else dist.get_global_rank(group, rank)


def _host() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return f"{platform.node()} {socket.gethostname()}"


def _gpu(device: torch.device) -> str:
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""


def _reachable(device: torch.device) -> tuple[str, ...]:
    if device.type != "cuda":
        return ()
    others = [torch.device("cuda", i) for i in range(torch.cuda.device_count()) if i != device.index]
    return tuple(_gpu(other) for other in others if torch.cuda.can_device_access_peer(device, other))


def _cannot(weight: Tensor) -> dict[str, str]:
    """Implementations that cannot do this shard, and why."""
    if weight.dim() != 2 or weight.shape[1] < 1:
        return {}  # _check says it better
    states = weight.new_empty((1, weight.shape[1]))
    shard = weight if weight.shape[0] else states  # an empty shard reads the hidden states instead
    reasons = {name: ops.kernel_cannot(name, states, shard) for name in ("cute", "triton")}
    return {name: reason for name, reason in reasons.items() if reason is not None}


def _check(members: Sequence[_Member]) -> list[tuple[int, int]]:
    """The ranks' token ranges [first, last), cut at the real vocabulary size. Raises alike on every rank."""
    for rank, member in enumerate(members):
        if len(member.shape) != 2 or member.shape[1] < 1:
            raise ValueError(f"weight must have shape (V_shard, D), got {member.shape} on rank {rank}")
        if member.dtype not in ("torch.bfloat16", "torch.float16", "torch.float32"):
            raise ValueError(f"weight must be bfloat16, float16 or float32, got {member.dtype} on rank {rank}")
    dims = [member.shape[1] for member in members]
    if len(set(dims)) > 1:
        raise ValueError(f"weight must have the same D on all ranks, got {_by_rank(dims)}")
    for name in ("dtype", "device", "vocab_size", "max_batch_size", "max_num_samples", "transport", "impl", "timeout"):
        values = [getattr(member, name) for member in members]
        if any(value != values[0] for value in values):
            raise ValueError(f"{name} must be the same on all ranks, got {_by_rank(values)}")
    one = members[0]
    for name in ("max_batch_size", "max_num_samples"):
        if getattr(one, name) < 1:
            raise ValueError(f"{name} must be at least 1, got {getattr(one, name)}")
    if not 0 < one.timeout < math.inf:
        raise ValueError(f"timeout must be above 0 and finite, got {one.timeout}")

    firsts = [member.first_token for member in members]
    if any(first is None for first in firsts) and not all(first is None for first in firsts):
        raise ValueError(f"first_token must be given on all ranks or on none, got {_by_rank(firsts)}")
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
            where = f"at token {min(first, end)}: {_by_rank(ranges)}"
            raise ValueError(f"shards must cover the vocabulary once, these {what} {where}")
        end = last
    if not 1 <= end < 2**31:
        raise ValueError(f"shards must hold from 1 to 2**31 - 1 tokens together, got {end}")
    real = end if one.vocab_size is None else one.vocab_size
    if not 1 <= real <= end:
        raise ValueError(f"vocab_size must be from 1 to the {end} rows of all shards, got {real}")
    return [(min(first, real), min(last, real)) for first, last in ranges]


def _by_rank(values: Sequence[Any]) -> str:
    return ", ".join(f"rank {rank}: {value}" for rank, value in enumerate(values))


def _choose_impl(members: Sequence[_Member]) -> str:
    asked = members[0].impl
    if asked is not None and asked not in _IMPLEMENTATIONS:
        raise ValueError(f"impl must be None or one of {', '.join(_IMPLEMENTATIONS)} under tensor parallelism, got {asked!r}")
    on_gpu = members[0].device == "cuda"
    for name in (asked,) if asked else _IMPLEMENTATIONS if on_gpu else ("streaming",):
        refused = {rank: member.cannot[name] for rank, member in enumerate(members) if name in member.cannot}
        if not refused:
            return name
    rank, reason = next(iter(refused.items()))
    raise ValueError(f"impl={asked!r} cannot do this on rank {rank}: {reason}")


def _choose_transport(members: Sequence[_Member], impl: str, group: dist.ProcessGroup | None, no_p2p: str | None = None) -> str:
    asked = members[0].transport
    if asked is not None and asked not in TRANSPORTS:
        raise ValueError(f"transport must be None or one of {', '.join(TRANSPORTS)}, got {asked!r}")
    backends, device = str(dist.get_backend_config(group)), members[0].device
    cannot = {
        "p2p": no_p2p or _why_no_p2p(members, impl),
        "nccl": None if device == "cuda" and "nccl" in backends else f"shards on {device}, group {backends}",
        "gloo": None if "gloo" in backends else f"group {backends}",
    }
    for name in (asked,) if asked else TRANSPORTS:
        if cannot[name] is None:
            return name
    reasons = "; ".join(f"{name}: {cannot[name]}" for name in ((asked,) if asked else TRANSPORTS))
    raise ValueError(f"transport={asked!r} cannot be used ({reasons})")


def _why_no_p2p(members: Sequence[_Member], impl: str) -> str | None:
    if members[0].device != "cuda":
        return f"a shard is on {members[0].device}"
    if impl == "streaming":
        return "impl 'streaming' has no kernel that could do the exchange"
    if len(members) > _MAX_P2P_RANKS:
        return f"{len(members)} ranks, it takes up to {_MAX_P2P_RANKS}"
    if len({member.host for member in members}) > 1:
        return "the ranks are on several hosts"
    for (a, one), (b, other) in itertools.permutations(enumerate(members), 2):
        if one.gpu == other.gpu:
            return f"ranks {a} and {b} share a GPU"
        if other.gpu not in one.peers:
            return f"the GPU of rank {a} cannot map the memory of rank {b}'s, or does not see it"
    return None
