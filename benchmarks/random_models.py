"""Models of random weights for engines: shapes, a folder with a configuration alone, and logits that spread as real
ones."""

import json
import tempfile
from pathlib import Path
from typing import Any

import torch

SHAPES = {  # hidden, layers, heads, MLP, tied
    "1.7b": (2048, 28, 16, 6144, True),
    "8b": (4096, 36, 32, 12288, False),
}
VOCAB, PROMPT = 151936, 32


def model_folder(
    hidden: int, layers: int, heads: int, mlp: int, tied: bool, vocab: int, key_heads: int, head_dim: int
) -> str:
    """A Qwen3 configuration alone."""
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "dtype": "bfloat16",
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": key_heads,
        "head_dim": head_dim,
        "vocab_size": vocab,
        "tie_word_embeddings": tied,
        "max_position_embeddings": 40960,
        "rope_theta": 1e6,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "attention_bias": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    folder = Path(tempfile.mkdtemp(prefix="qwen3-"))
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def spread(model: Any, deviation: float) -> None:
    """Gives random weights logits of such a standard deviation, about as real ones have; theirs are all about equal.

    The layers of random weights add next to nothing to the last token's embedding. That must be large beside the
    epsilon of the last norm, and where the head is the embedding, random signs in that norm keep the last token from
    knowing itself."""
    head, embedding, norm = model.lm_head.weight, model.model.embed_tokens.weight, model.model.norm.weight
    first = model.lm_head.shard_indices.padded_org_vocab_start_index  # ranks have rows of their own
    generator = torch.Generator(head.device).manual_seed(first)
    with torch.inference_mode():
        for weight in [head] if head.data_ptr() == embedding.data_ptr() else [head, embedding]:
            for rows in weight.data.split(8192):
                rows.normal_(0.0, 0.02, generator=generator)
        of_all = torch.Generator(head.device).manual_seed(0)  # every rank has the same norm
        signs = torch.randint(0, 2, norm.shape, generator=of_all, device=norm.device) * 2 - 1
        norm.data.copy_(signs * (deviation / 0.02 / head.shape[1] ** 0.5))
