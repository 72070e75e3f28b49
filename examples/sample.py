"""One decode step: hidden states and an LM head in, token ids out. ``python examples/sample.py``"""

import torch

import flashsampling

device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
torch.manual_seed(0)
batch, vocab, dim = 4, 32_000, 256
hidden_states = torch.randn(batch, dim, device=device, dtype=dtype)
weight = torch.randn(vocab, dim, device=device, dtype=dtype) / 4  # in a model: model.lm_head.weight

temperature = torch.tensor([0.0, 0.7, 1.0, 1.3], device=device)  # per row; 0 is greedy
seeds = torch.arange(batch, device=device)  # one per request, for all its tokens
offsets = torch.zeros(batch, dtype=torch.int64, device=device)  # how many tokens each request has drawn

token_ids = flashsampling.sample(hidden_states, weight, temperature=temperature, seed=seeds, offset=offsets).token_ids
print("tokens, (B,)", token_ids.tolist())
assert token_ids[0] == (hidden_states[0].double() @ weight.double().T).argmax()

# The next token of each request has the next offset. (In a model the hidden states change, too.)
later = flashsampling.sample(hidden_states, weight, temperature=temperature, seed=seeds, offset=offsets + 1).token_ids
print("with the next offset", later.tolist())

# A row's token depends on that row alone: request 2 replays without its batch mates.
alone = flashsampling.sample(hidden_states[2:3], weight, temperature=1.0, seed=2, offset=0).token_ids
print("row 2 by itself", alone.tolist())
assert alone[0] == token_ids[2]

# Several draws of one distribution, each with noise of its own.
several = flashsampling.sample(hidden_states, weight, temperature=temperature, seed=seeds, num_samples=3).token_ids
print("three draws, (B, 3)", several.tolist())
assert torch.equal(several[:, 0], token_ids)
