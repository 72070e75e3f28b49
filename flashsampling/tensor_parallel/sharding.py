"""Shards of an LM head: which rows a rank has."""

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh


def shard_range(
    vocab: int,
    rank: int,
    world_size: int,
) -> tuple[int, int]:
    """Returns the rows [first, last) of a (vocab, D) LM head that ``shard_lm_head`` gives a rank.

    Shards are even, in whole blocks of 128 ids; the last ranks get less, or nothing. Blocks of 128 are whole Philox
    groups and whole tiles: no tile is cut in two.

    Args:
        vocab: rows of the whole LM head, at least 0.
        rank: from 0 to ``world_size - 1``.
        world_size: ranks.

    Example:
        >>> from flashsampling.tensor_parallel import shard_range
        >>> [shard_range(128_256, rank, world_size=4) for rank in range(4)]
        [(0, 32128), (32128, 64256), (64256, 96384), (96384, 128256)]
    """
    rows = -(-vocab // (128 * world_size)) * 128
    return min(rank * rows, vocab), min((rank + 1) * rows, vocab)


def shard_lm_head(
    weight: Tensor,  # (V, D)
    group: dist.ProcessGroup | DeviceMesh | None = None,
) -> Tensor:
    """Returns this rank's shard of an LM head (``shard_range``), as a copy, so that the whole weight can be freed.

    Args:
        weight: (V, D), the whole LM head, on any device.
        group: as in ``TensorParallel``.

    Returns:
        (V_shard, D), dtype and device as the weight's; V_shard may be 0.

    Raises:
        ValueError: torch.distributed is not initialised, this process is not in the group, or a mesh has several
            dimensions.

    Example:
        >>> import torch
        >>> from flashsampling.tensor_parallel import shard_lm_head
        >>> torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
        >>> shard_lm_head(torch.zeros(1000, 8)).shape  # one rank has all of it
        torch.Size([1000, 8])
        >>> torch.distributed.destroy_process_group()
    """
    rank, world_size = rank_and_size(process_group(group))
    first, last = shard_range(weight.shape[0], rank, world_size)
    return weight[first:last].clone()


def process_group(group: dist.ProcessGroup | DeviceMesh | None) -> dist.ProcessGroup | None:
    """Returns the process group of a one-dimensional mesh; any other value unchanged."""
    if not isinstance(group, DeviceMesh):
        return group
    if group.ndim != 1:
        names = group.mesh_dim_names
        example = names[-1] if names else "tp"
        raise ValueError(
            f"group must be a process group or a one-dimensional DeviceMesh, got one of shape {tuple(group.shape)}; "
            f'pass one dimension of it, mesh["{example}"]'
        )
    if group.get_coordinate() is None:
        raise ValueError("group must contain this process, which is not in the DeviceMesh")
    return group.get_group()


def rank_and_size(group: dist.ProcessGroup | None) -> tuple[int, int]:
    """Returns this process's rank in the group, and the number of ranks."""
    if not (dist.is_available() and dist.is_initialized()):
        raise ValueError("torch.distributed must be initialised (torch.distributed.init_process_group)")
    rank = dist.get_rank(group)
    if rank < 0:
        raise ValueError("group must contain this process")
    return rank, dist.get_world_size(group)
