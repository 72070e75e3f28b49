"""Hugging Face transformers: ``model.generate`` without logits in memory. ``python examples/generate.py``

The model is tiny and random, so that nothing is downloaded; any causal LM of docs/transformers.md works alike.
"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from flashsampling import LMHeadSampler
from flashsampling.integrations.transformers import generate

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
sizes = {
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
model = LlamaForCausalLM(LlamaConfig(**sizes, pad_token_id=0, eos_token_id=2)).to(device).eval()

prompts = torch.randint(3, 1000, (3, 5)).to(device)
# top_k=0: of itself transformers keeps the 50 best, which works too
options = {"custom_generate": generate, "do_sample": True, "temperature": 0.8, "top_k": 0, "max_new_tokens": 8}
batch = model.generate(prompts, attention_mask=torch.ones_like(prompts), seed=[1, 2, 3], **options)
print("new tokens", batch[:, 5:].tolist())

# The third prompt by itself, with its own seed: the same tokens.
alone = model.generate(prompts[2:], attention_mask=torch.ones_like(prompts[2:]), seed=[3], **options)
print("the third alone", alone[:, 5:].tolist())
assert torch.equal(alone[0], batch[2])

# A sampler of one's own goes from call to call; temperatures are per sequence, 0 is greedy.
sampler = LMHeadSampler.from_model(model, max_batch_size=16, seed=1234)  # takes a scale and a soft cap along
options |= {"sampler": sampler, "temperatures": [0.0, 0.7, 1.3]}
mixed = model.generate(prompts, attention_mask=torch.ones_like(prompts), **options)
print("greedy, cool, hot", mixed[:, 5:].tolist())
assert mixed[0, 5] == model(prompts).logits[0, -1].argmax()
