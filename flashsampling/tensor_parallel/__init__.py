"""Tensor parallelism: the vocabulary is sharded over ranks, every rank draws the same token, and no logits are gathered.

Each rank samples its shard, and the ranks agree on the winner by some bytes per row and rank. Three transports carry them, with
the same result:

    p2p     the sampling kernel stores its winners into the peers' memory and waits for theirs: one launch in all
    nccl    an all-gather after the kernel; across nodes, or where peers cannot map each other's memory
    gloo    point to point through the host: on CPUs

What a winner looks like on the way, and the peer-to-peer protocol with its memory orders, stand in ``exchange``. Read ``group``
first, then ``construction``, ``agreement`` (what ranks must agree on), ``rendezvous`` (how they meet outside of steps),
``failure`` and the transports. What users do about failures stands in docs/tensor_parallel.md.
"""

from .failures import Failure, TensorParallelError, TensorParallelMismatch, TensorParallelTimeout
from .group import TensorParallel
from .nccl import gather_flat
from .sharding import shard_lm_head, shard_range

__all__ = [
    "Failure",
    "TensorParallel",
    "TensorParallelError",
    "TensorParallelMismatch",
    "TensorParallelTimeout",
    "gather_flat",
    "shard_lm_head",
    "shard_range",
]
