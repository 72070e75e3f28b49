"""Continuous batching: requests come and go at any time, each with sampling parameters of its own in a slot of the
sampler's pool. A step tells the sampler the slots of its batch. ``python examples/continuous_batching.py``

The model is tiny and random. Its cache has a row per slot, and every step feeds each request one token: first those of
its prompt, then those that it draws.
"""

import random
import time
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.cache_utils import Cache, CacheLayerMixin

from flashsampling import LMHeadSampler

SLOTS, LENGTH, VOCAB, REQUESTS = 8, 40, 1000, 30
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, **sizes, pad_token_id=0)).to(device).eval()


class Layer(CacheLayerMixin):
    """A static cache whose rows are at positions of their own."""

    def __init__(self, positions: torch.Tensor) -> None:
        super().__init__()
        self.positions, self.rows = positions, torch.arange(SLOTS, device=device)

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        shape = SLOTS, key_states.shape[1], LENGTH, key_states.shape[3]
        self.keys, self.values, self.is_initialized = key_states.new_zeros(shape), key_states.new_zeros(shape), True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **options: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.keys[self.rows, :, self.positions] = key_states[:, :, 0]
        self.values[self.rows, :, self.positions] = value_states[:, :, 0]
        return self.keys, self.values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return LENGTH, 0

    def get_seq_length(self) -> int:
        return LENGTH

    def get_max_length(self) -> int:
        return LENGTH


@dataclass
class Request:
    seed: int
    prompt: list[int]
    new_tokens: int
    params: dict[str, Any]
    tokens: list[int] = field(default_factory=list)  # those that it has drawn

    def sequence(self) -> list[int]:
        return self.prompt + self.tokens


def random_request(number: int) -> Request:
    rng = random.Random(number)
    params = {"temperature": rng.choice([0.0, 0.7, 1.2]), "top_p": rng.choice([1.0, 0.9])}
    params |= rng.choice([{}, {"top_k": 20}, {"min_p": 0.05}, {"repetition_penalty": 1.2}])
    return Request(number, rng.choices(range(1, VOCAB), k=rng.randint(1, 8)), rng.randint(4, 24), params)


@torch.no_grad()
def serve(requests: list[Request], arrival: random.Random | None = None) -> tuple[int, float]:
    """Draws the tokens of all requests, which arrive at random steps. Returns the number of tokens, and seconds."""
    sampler = LMHeadSampler(model.lm_head, max_batch_size=SLOTS)
    inputs, positions = (torch.zeros(SLOTS, dtype=torch.int64, device=device) for _ in range(2))
    cache = Cache(layers=[Layer(positions) for _ in model.model.layers])
    waiting, drawn, began = list(requests), 0, time.perf_counter()
    running: dict[int, Request] = {}  # by slot
    while waiting or running:
        for slot in sorted(set(range(SLOTS)) - set(running)):
            if waiting and (arrival is None or arrival.random() < 0.3):
                running[slot] = request = waiting.pop(0)
                sampler.pool.admit(slot, seed=request.seed, prompt_token_ids=request.prompt, **request.params)
        fed = {slot: min(int(positions[slot]), len(each.sequence()) - 1) for slot, each in running.items()}
        inputs.copy_(torch.tensor([running[s].sequence()[fed[s]] if s in running else 0 for s in range(SLOTS)]))
        mask = torch.arange(LENGTH, device=device) <= positions[:, None]
        states = model.model(
            inputs[:, None], attention_mask=mask[:, None, None], position_ids=positions[:, None], past_key_values=cache
        ).last_hidden_state[:, 0]
        # a slot that is free, or has more of its prompt to read, is padding: it draws nothing
        slots = [s if s in running and fed[s] == len(running[s].sequence()) - 1 else -1 for s in range(SLOTS)]
        tokens = sampler(states, slots=torch.tensor(slots, device=device)).token_ids.tolist()
        positions += 1
        for slot, request in list(running.items()):
            if slots[slot] >= 0:
                request.tokens.append(tokens[slot])
                drawn += 1
            if len(request.tokens) == request.new_tokens:
                sampler.pool.release(slot)
                del running[slot]
        positions[[slot for slot in range(SLOTS) if slot not in running]] = 0
        if arrival is not None and drawn % 50 < len(running):
            print(f"{drawn} tokens, {drawn / (time.perf_counter() - began):.0f} a second, slots in use: {len(running)}")
    return drawn, time.perf_counter() - began


batched = [random_request(number) for number in range(REQUESTS)]
count, seconds = serve(batched, random.Random(1))
for each in batched:
    alone = random_request(each.seed)
    serve([alone])
    assert alone.tokens == each.tokens, (each, alone)
print(f"{REQUESTS} requests, {count} tokens, {count / seconds:.0f} a second; each has the tokens of its run alone")
