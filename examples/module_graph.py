"""``LMHeadSampler`` keeps seeds and offsets on the device; a step in a CUDA graph, if there is a GPU.

``python examples/module_graph.py``
"""

import torch
from torch import nn

import flashsampling
from flashsampling import LMHeadSampler

device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
torch.manual_seed(0)
batch, vocab, dim = 4, 32_000, 256
lm_head = nn.Linear(dim, vocab, bias=False, device=device, dtype=dtype).requires_grad_(False)
# a graph's input: the model writes each step's into it
hidden_states = torch.randn(batch, dim, device=device, dtype=dtype)

sampler = LMHeadSampler(lm_head, max_batch_size=64, seed=1234, temperature=0.8)  # each row gets a seed of its own
eager = torch.stack([sampler(hidden_states).token_ids for _ in range(3)])  # every call advances the offsets
print("three steps", eager.tolist())
print("offsets", sampler.offsets[: batch + 1].tolist())

# From the start again: the same seeds and offsets draw the same tokens.
sampler.reset(seed=1234)
if device == "cuda":
    flashsampling.warmup(lm_head.weight, max_batch_size=batch)  # compiles ahead: nothing can while a graph is captured
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        token_ids = sampler(hidden_states).token_ids
    replays = []
    for _ in range(3):
        graph.replay()  # draws anew, and writes into the same token_ids
        replays.append(token_ids.clone())
    again = torch.stack(replays)
else:
    again = torch.stack([sampler(hidden_states).token_ids for _ in range(3)])
print("again", again.tolist())
assert torch.equal(again, eager)
