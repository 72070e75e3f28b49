"""The LM head sharded over ranks.

``python -m torch.distributed.run --standalone --nproc_per_node 2 examples/tensor_parallel.py``
Each rank on a GPU of its own if there are as many, else all on the CPU.
"""

import os
from typing import Any

import torch
import torch.distributed as dist

import flashsampling
from flashsampling.tensor_parallel import TensorParallel, shard_lm_head

rank, ranks = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
on_gpu = torch.cuda.device_count() >= ranks
device, dtype = (torch.device("cuda", rank), torch.bfloat16) if on_gpu else (torch.device("cpu"), torch.float32)
if on_gpu:
    torch.cuda.set_device(device)
dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo")

torch.manual_seed(0)  # the same on all ranks: hidden states and parameters must be, the weight is a model's
hidden_states, weight = (torch.randn(size, 256).to(device, dtype) for size in (4, 32_000))
rows: dict[str, Any] = {"temperature": 4.0, "seed": torch.arange(4, device=device), "offset": 0}

shard = shard_lm_head(weight)  # this rank's rows
with TensorParallel(None, shard, max_batch_size=64, timeout=60.0) as tp:  # once, on all ranks; closing waits for all
    token_ids = flashsampling.sample(hidden_states, shard, **rows, tp=tp).token_ids
    tp.check()  # raises if a rank was late or differed; needed where a step cannot raise by itself, in graph replays
    print(
        f"rank {tp.rank} of {tp.world_size}: ids {tp.first_token} to {tp.last_token - 1}; "
        f"{tp.transport}: {token_ids.tolist()}"
    )
    whole = flashsampling.sample(
        hidden_states, weight, **rows, impl=tp.impl
    ).token_ids  # what one rank alone would draw
    assert torch.equal(token_ids, whole)
dist.destroy_process_group()
