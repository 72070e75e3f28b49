"""Tensor parallelism: ranks share the vocabulary, every rank draws the same token, and no logits are gathered.

Each rank samples its shard, and the ranks agree on the winner by some bytes per row and rank. Three transports carry
them, with the same result:

    p2p     the sampling kernel stores its winners into the peers' memory and waits for the peers' winners: one launch
    nccl    an all-gather after the kernel; across nodes, or where peers cannot map each other's memory
    gloo    point to point through the host: on CPUs

Read ``group`` first, then ``construction``, ``capabilities`` (what ranks must agree on), ``rendezvous`` (collective
calls outside of steps), ``failures`` and the transports. ``exchange_protocol`` defines the packed winner and the
peer-to-peer protocol with its memory orders. docs/tensor_parallel.md tells users what to do about failures.
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
