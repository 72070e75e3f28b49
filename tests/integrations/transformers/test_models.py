"""The table of models in docs/transformers.md, run: tiny random models of many families, against plain transformers."""

import re
from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers")

from flashsampling import LMHeadSampler  # noqa: E402
from flashsampling.integrations.transformers import generate  # noqa: E402
from tests.conftest import DEVICE  # noqa: E402
from tests.integrations.transformers.oracle import GumbelNoise, plain  # noqa: E402

TOKENS = {"vocab_size": 320, "pad_token_id": 5, "bos_token_id": 1, "eos_token_id": 2}
SIZES = TOKENS | {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}  # fmt: skip
HEADS = SIZES | {"head_dim": 8}
GPT = TOKENS | {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
MAMBA = TOKENS | {"hidden_size": 32, "state_size": 4, "num_hidden_layers": 2}
HYBRID = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8}
LATENT = SIZES | {
    "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 8, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 1,
    "topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1,
}  # fmt: skip

# what the table's first column says: the class, perhaps a setting -> its configuration
MODELS = {
    "LlamaForCausalLM": SIZES,
    "Llama4ForCausalLM": HEADS | {"intermediate_size_mlp": 64, "num_local_experts": 2, "moe_layers": [1]},
    "MistralForCausalLM": SIZES | {"sliding_window": 8},
    "MixtralForCausalLM": SIZES | {"num_local_experts": 4},
    "Qwen2ForCausalLM": SIZES,
    "Qwen3ForCausalLM": HEADS,
    "Qwen3MoeForCausalLM": HEADS | EXPERTS,
    "Qwen3NextForCausalLM": HEADS | EXPERTS | {
        "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
        "layer_types": ["linear_attention", "full_attention"], "shared_expert_intermediate_size": 16,
    },
    "GemmaForCausalLM": HEADS,
    "Gemma2ForCausalLM": HEADS | {"sliding_window": 8},
    "Gemma2ForCausalLM, final_logit_softcapping=None": HEADS | {"sliding_window": 8, "final_logit_softcapping": None},
    "Gemma3ForCausalLM": HEADS | {"sliding_window": 8},
    "Gemma3ForCausalLM, final_logit_softcapping=5.0": HEADS | {"sliding_window": 8, "final_logit_softcapping": 5.0},
    "Gemma3nForCausalLM": HEADS | {
        "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"], "num_kv_shared_layers": 0,
        "vocab_size_per_layer_input": 320, "hidden_size_per_layer_input": 8, "laurel_rank": 4,
        "activation_sparsity_pattern": [0.0, 0.0],
    },
    "Gemma4ForCausalLM": HEADS | {
        "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"], "global_head_dim": 8,
        "vocab_size_per_layer_input": 320, "hidden_size_per_layer_input": 8, "final_logit_softcapping": 5.0,
    },
    "VaultGemmaForCausalLM": HEADS | {"sliding_window": 8},
    "RecurrentGemmaForCausalLM": SIZES | {"num_hidden_layers": 3, "lru_width": 32, "attention_window_size": 16},
    "PhiForCausalLM": SIZES,
    "Phi3ForCausalLM": SIZES | {"sliding_window": 8},
    "GPT2LMHeadModel": GPT,
    "GPTNeoForCausalLM": TOKENS | {
        "hidden_size": 32, "num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]],
        "max_position_embeddings": 128,
    },
    "GPTNeoXForCausalLM": {name: value for name, value in SIZES.items() if name != "num_key_value_heads"},
    "GPTJForCausalLM": GPT | {"rotary_dim": 4},
    "GPTBigCodeForCausalLM": GPT,
    "GptOssForCausalLM": HEADS | {
        "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "OPTForCausalLM": TOKENS | {
        "hidden_size": 32, "ffn_dim": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "max_position_embeddings": 128,
        "word_embed_proj_dim": 16, "do_layer_norm_before": False,
    },
    "BloomForCausalLM": TOKENS | {"hidden_size": 32, "n_layer": 2, "n_head": 4},
    "FalconForCausalLM": TOKENS | {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4},
    "FalconH1ForCausalLM": HEADS | {
        "mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1,
        "lm_head_multiplier": 0.5,
    },
    "StableLmForCausalLM": SIZES,
    "Starcoder2ForCausalLM": SIZES,
    "SmolLM3ForCausalLM": SIZES,
    "CohereForCausalLM": SIZES,
    "Cohere2ForCausalLM": SIZES,
    "GraniteForCausalLM": SIZES | {"logits_scaling": 8.0},
    "GraniteForCausalLM, logits_scaling=1.0": SIZES | {"logits_scaling": 1.0},
    "GraniteMoeForCausalLM": SIZES | {"num_local_experts": 4, "num_experts_per_tok": 2, "logits_scaling": 3.0},
    "HyperCLOVAXForCausalLM": SIZES | {"logits_scaling": 0.3},
    "NanoChatForCausalLM": SIZES,
    "OlmoForCausalLM": SIZES,
    "Olmo2ForCausalLM": SIZES,
    "OlmoeForCausalLM": SIZES | {"num_experts": 4, "num_experts_per_tok": 2},
    "DeepseekV2ForCausalLM": LATENT,
    "DeepseekV3ForCausalLM": LATENT,
    "Glm4ForCausalLM": HEADS,
    "NemotronForCausalLM": SIZES,
    "MptForCausalLM": TOKENS | {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 128},
    "MambaForCausalLM": MAMBA,
    "Mamba2ForCausalLM": MAMBA | {"num_heads": 8, "head_dim": 8, "n_groups": 1, "chunk_size": 8},
    "FalconMambaForCausalLM": MAMBA,
    "JambaForCausalLM": SIZES | {
        "num_experts": 2, "num_experts_per_tok": 1, "use_mamba_kernels": False, "mamba_d_state": 4, "mamba_dt_rank": 4,
        "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1,
    },
    "BambaForCausalLM": SIZES | HYBRID | {"attn_layer_indices": [1]},
    "GraniteMoeHybridForCausalLM": SIZES | HYBRID | {
        "layer_types": ["mamba", "attention"], "num_local_experts": 2, "num_experts_per_tok": 1, "logits_scaling": 4.0,
    },
    "Lfm2ForCausalLM": SIZES | {"layer_types": ["conv", "full_attention"]},
    "RwkvForCausalLM": TOKENS | {"hidden_size": 32, "attention_hidden_size": 32, "num_hidden_layers": 2},
    "CTRLLMHeadModel": TOKENS | {"n_embd": 32, "n_layer": 2, "n_head": 4, "dff": 64, "n_positions": 128},
    "T5ForConditionalGeneration": TOKENS | {
        "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0,
    },
}  # fmt: skip
# heads that are not a weight alone, and one that is
DEFAULTS = (
    "LlamaForCausalLM", "Gemma2ForCausalLM", "Gemma3ForCausalLM, final_logit_softcapping=5.0", "Gemma4ForCausalLM",
    "CohereForCausalLM", "GraniteForCausalLM", "PhiForCausalLM", "GPTJForCausalLM",
)  # fmt: skip
# and without a cache, from each kind: attention, sliding window, state space, hybrid
WITHOUT_CACHE = ("LlamaForCausalLM", "Gemma3ForCausalLM", "MambaForCausalLM", "Lfm2ForCausalLM", "RwkvForCausalLM")
STATEFUL = "assisted generation is not supported with stateful models"  # says transformers
WITHOUT_DRAFTS = {
    **dict.fromkeys((
        "Qwen3NextForCausalLM", "RecurrentGemmaForCausalLM", "FalconH1ForCausalLM", "MambaForCausalLM",
        "Mamba2ForCausalLM", "FalconMambaForCausalLM", "JambaForCausalLM", "BambaForCausalLM",
        "GraniteMoeHybridForCausalLM", "RwkvForCausalLM",
    ), STATEFUL),
    "Lfm2ForCausalLM": "can be cut back, got DynamicCache of LinearAttentionLayer",
    "MptForCausalLM": "drafts need a key and value cache",
}  # fmt: skip
# from each kind of cache, position, attention and logit transform: drafts run several tokens and cut the cache back
WITH_DRAFTS = (
    "LlamaForCausalLM", "Llama4ForCausalLM", "MistralForCausalLM", "Gemma2ForCausalLM", "Gemma3nForCausalLM",
    "Gemma4ForCausalLM", "GPT2LMHeadModel", "GPTNeoForCausalLM", "GptOssForCausalLM", "OPTForCausalLM",
    "BloomForCausalLM", "FalconForCausalLM", "GraniteMoeForCausalLM", "DeepseekV3ForCausalLM",
)  # fmt: skip
PAGE = (Path(__file__).parents[3] / "docs" / "transformers.md").read_text()
RESULTS = {
    name.replace("`", ""): result
    for result, names in re.findall(r"^\| (works|refused: [^|]*) \| (`.*) \|$", PAGE, flags=re.MULTILINE)
    for name in names.split("; ")
}


def tiny(name: str):
    """The model, its head scaled until its logits have a standard deviation of about 3: with less the noise alone
    decides.

    A head that is tied to the embeddings gets a weight of its own, else the last token would come again; a bias others
    than 0.
    """
    torch.manual_seed(0)
    config = re.sub("(ForCausalLM|LMHeadModel|ForConditionalGeneration).*", "", name)
    config += "Text" if config in ("Gemma3", "Gemma3n", "Gemma4", "Llama4") else ""
    model = (
        getattr(transformers, name.split(",")[0])(getattr(transformers, config + "Config")(**MODELS[name]))
        .to(DEVICE)
        .eval()
    )
    if not model.config.is_encoder_decoder:
        head = model.get_output_embeddings()
        with torch.no_grad():
            if head.weight is model.get_input_embeddings().weight:
                head.weight = torch.nn.Parameter(torch.randn_like(head.weight) / 5)
            if head.bias is not None:
                head.bias.normal_()
            for _ in range(4):  # a soft cap leaves less
                head.weight.mul_(3 / model(**prompt()).logits.std())
    return model


def prompt() -> dict[str, torch.Tensor]:
    ids = torch.randint(6, 320, (3, 7), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    ids[0, :3], mask[0, :3] = 5, 0
    return {"input_ids": ids.to(DEVICE), "attention_mask": mask.to(DEVICE)}


def test_the_table_has_the_models_that_are_tried():
    assert list(RESULTS) == list(MODELS)


@pytest.mark.quick(39)
@pytest.mark.parametrize(
    ("name", "use_cache"), [(name, True) for name in MODELS] + [(name, False) for name in WITHOUT_CACHE], ids=str
)
def test_model(name, use_cache):
    model = tiny(name)
    seeds = torch.tensor([11, -5, 2**62], device=DEVICE)
    options = prompt() | {"max_new_tokens": 8, "eos_token_id": 319, "use_cache": use_cache}
    sampled = options | {"do_sample": True, "temperature": 0.8, "top_k": 0, "custom_generate": generate, "seed": seeds}
    if RESULTS[name] == "works":
        fused = model.generate(**sampled)
        assert torch.equal(fused, plain(model, seeds, **options, temperature=0.8, top_k=0))
        noise_alone = GumbelNoise(seeds)(fused, torch.zeros(3, 320, device=DEVICE)).argmax(-1)
        assert not torch.equal(fused[:, 7], noise_alone), "the model has no say in what is drawn"
        assert not model.get_output_embeddings()._forward_hooks
        return
    for refused in (lambda: model.generate(**sampled), lambda: LMHeadSampler.from_model(model)):
        with pytest.raises(ValueError) as error:
            refused()
        assert RESULTS[name].removeprefix("refused: ") in str(error.value)


@pytest.mark.quick(8)
@pytest.mark.parametrize("name", [*WITH_DRAFTS, *WITHOUT_DRAFTS])
def test_drafts(name):
    """Drafts of the model itself and of its text give the same tokens, or are refused."""
    model = tiny(name)
    ids = prompt()["input_ids"][1:2].repeat(1, 3)
    options = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "max_new_tokens": 12, "eos_token_id": 319}
    options |= {"do_sample": True, "temperature": 0.6, "custom_generate": generate, "seed": [3]}
    if name in WITHOUT_DRAFTS:
        with pytest.raises(ValueError, match=WITHOUT_DRAFTS[name]):
            model.generate(**options, prompt_lookup_num_tokens=3)
        return
    plain = model.generate(**options)
    verified, verify = [], LMHeadSampler.verify

    def counted(*given, **more):
        verified.append(1)
        return verify(*given, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LMHeadSampler, "verify", counted)
        assert torch.equal(model.generate(**options, assistant_model=model), plain)
    assert len(verified) <= 1 + -(-(plain.shape[1] - 22) // 6)  # all drafts hold: 1 from the prompt, then 6 a run
    assert torch.equal(model.generate(**options, prompt_lookup_num_tokens=3), plain)


@pytest.mark.quick(3)
@pytest.mark.parametrize("name", DEFAULTS)
def test_default_settings(name):
    """``top_k=50`` and nothing else; and with a penalty, which looks at the sign of what the head's transform
    leaves."""
    model = tiny(name)
    seeds = torch.tensor([11, -5, 2**62], device=DEVICE)
    for more in ({}, {"repetition_penalty": 1.3, "top_p": 0.8}):
        options = prompt() | {"max_new_tokens": 8, "eos_token_id": 319} | more
        fused = model.generate(**options, do_sample=True, custom_generate=generate, seed=seeds)
        assert torch.equal(fused, plain(model, seeds, **options))
        assert len(fused[:, 7:].unique()) > 8
    # a sampler of the weight alone: generate passes the transform on
    head = model.get_output_embeddings()
    sampled = options | {"do_sample": True, "custom_generate": generate, "seed": seeds}
    if head.bias is None:
        assert torch.equal(model.generate(**sampled, sampler=LMHeadSampler(head.weight)), fused)
    else:
        with pytest.raises(ValueError, match="sampler must have the bias"):
            model.generate(**sampled, sampler=LMHeadSampler(head.weight))
