"""Reinforcement learning on sampled tokens: ``sample`` rolls out with filters, ``score`` gives a trainer the very
log-probabilities that the tokens were drawn with, and gradients. ``python examples/grpo_logprobs.py``

The policy is a GRU that is to write even tokens. Its hidden states have the same bits in rollout and training, so the
ratio of the first step is exactly 1. A transformer's may differ between engine and trainer; then so do ratios.
"""

from typing import Any

import torch
from torch import Tensor, nn

import flashsampling

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
BATCH, STEPS, VOCAB, DIM = 64, 12, 1000, 64
embed, cell = nn.Embedding(VOCAB, DIM).to(device), nn.GRUCell(DIM, DIM).to(device)
lm_head = nn.Linear(DIM, VOCAB, bias=False).to(device)
parameters = [*embed.parameters(), *cell.parameters(), *lm_head.parameters()]
optimizer = torch.optim.Adam(parameters, lr=1e-2)
FILTERS: dict[str, Any] = {
    "temperature": 1.0,
    "top_p": 0.95,
}  # what tokens are drawn from


@torch.no_grad()
def roll_out(number: int) -> tuple[Tensor, Tensor]:
    """Returns tokens and their processed log-probabilities, (STEPS, BATCH)."""
    seeds, state = torch.arange(BATCH, device=device) + 1000 * number, torch.zeros(BATCH, DIM, device=device)
    token, tokens, logprobs = torch.zeros(BATCH, dtype=torch.int64, device=device), [], []
    for step in range(STEPS):
        state = cell(embed(token), state)
        out = flashsampling.sample(state, lm_head.weight, seed=seeds, offset=step, return_logprobs=True, **FILTERS)
        assert out.processed_logprobs is not None
        token = out.token_ids
        tokens.append(token)
        logprobs.append(out.processed_logprobs)
    return torch.stack(tokens), torch.stack(logprobs)


def hidden_states(tokens: Tensor) -> Tensor:
    """Returns the states that the tokens were drawn from, (STEPS * BATCH, DIM), with gradients."""
    state, token, states = torch.zeros(BATCH, DIM, device=device), torch.zeros_like(tokens[0]), []
    for step in range(STEPS):
        state = cell(embed(token), state)
        states.append(state)
        token = tokens[step]
    return torch.cat(states)


for number in range(31):
    tokens, logprobs = roll_out(number)
    reward = (tokens % 2 == 0).float().mean(0)  # of every sequence
    advantage = ((reward - reward.mean()) / (reward.std() + 1e-6)).repeat(STEPS)
    scored = flashsampling.score(hidden_states(tokens), lm_head.weight, tokens.flatten(), **FILTERS)
    ratio = (scored.processed_logprobs - logprobs.flatten()).exp()
    assert torch.equal(ratio, torch.ones_like(ratio)), "the trainer scores what the engine drew"
    if number % 10 == 0:
        print(f"after {number} steps: reward {reward.mean():.2f}, ratios from {ratio.min():g} to {ratio.max():g}")
    optimizer.zero_grad()
    (-(advantage * scored.logprobs).mean()).backward()  # the gradient of the raw log-probability
    optimizer.step()
