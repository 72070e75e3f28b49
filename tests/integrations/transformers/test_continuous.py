"""transformers' continuous batching with the fused step, on a CPU: its own scheduler, cache and thread, tiny random
models."""

import math
import time
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("flashsampling.integrations.transformers.continuous", exc_type=ImportError)

import transformers
from transformers import CompileConfig, ContinuousBatchingConfig, GenerationConfig, GraniteConfig, LlamaConfig

import flashsampling
from flashsampling.integrations.transformers import continuous, generate
from flashsampling.integrations.transformers.continuous import FusedBatchingManager, generate_batch

V, D = 331, 32
PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8], [9, 10] * 9, [3]]
SEEDS = [5, -6, 2**63 - 1, 2**64 - 1]
SIZES = dict(
    vocab_size=V, hidden_size=D, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
)


def made(kind, config, std=1.0):
    """A model whose tokens are not all as likely."""
    torch.manual_seed(0)
    model = kind(config).eval()
    model.lm_head.weight.data.normal_(std=std, generator=torch.Generator().manual_seed(1))
    return model


def llama():
    return made(transformers.LlamaForCausalLM, LlamaConfig(**SIZES, max_position_embeddings=256))


def granite():
    config = GraniteConfig(**SIZES, logits_scaling=0.125, tie_word_embeddings=False)
    return made(transformers.GraniteForCausalLM, config, 0.1)


def config_of(**given):
    return GenerationConfig(**{"do_sample": True, "max_new_tokens": 6, "eos_token_id": -1, "top_k": 0} | given)


def batching(**given):
    return ContinuousBatchingConfig(
        **{"num_blocks": 64, "max_batch_tokens": 64, "per_request_processors": True} | given
    )


@torch.no_grad()
def drawn(model, prompt, seed, count, **request):
    """Decodes step by step over the whole sequence, without cache or batch, with an ``LMHeadSampler`` of one row."""
    sampler = flashsampling.LMHeadSampler(model.lm_head.weight, max_batch_size=1)
    sampler.reset([seed if seed < 2**63 else seed - 2**64])
    scale = getattr(model.config, "logits_scaling", None)
    if scale is not None:
        request["logit_scale"] = 1 / scale
    tokens: list[int] = []
    logprobs: list[float] = []
    for _ in range(count):
        states = model.model(torch.tensor([[*prompt, *tokens]], device=model.device)).last_hidden_state[:, -1]
        out = sampler(states, return_logprobs=True, **request)
        tokens.append(int(out.token_ids))
        logprobs.append(float(out.processed_logprobs))
    return tokens, logprobs


KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "temperature": {"temperature": 0.6},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.6, "temperature": 1.5},
    "min_p": {"min_p": 0.1},
    "all": {"temperature": 1.3, "top_k": 40, "top_p": 0.9, "min_p": 0.01},
    "greedy": {"do_sample": False},
}


@pytest.mark.quick(3)
@pytest.mark.parametrize(
    ("kind", "per_request"), [*((kind, True) for kind in KINDS), ("all", False), ("greedy", False)]
)
def test_tokens_and_logprobs_are_the_samplers(kind, per_request):
    settings = batching(return_logprobs=True, per_request_processors=per_request)
    config = config_of(**KINDS[kind])
    outputs = generate_batch(llama(), PROMPTS, config, seed=SEEDS, continuous_batching_config=settings)
    params = {name: value for name, value in KINDS[kind].items() if name != "do_sample"}
    if kind == "greedy":
        params["temperature"] = 0.0
    for prompt, seed, output in zip(PROMPTS, SEEDS, outputs):
        tokens, logprobs = drawn(llama(), prompt, seed, 6, **params)
        assert output.generated_tokens == tokens
        torch.testing.assert_close(output.logprobs, logprobs, rtol=0, atol=1e-4)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_tokens_are_those_of_generate(attention):
    config = config_of(temperature=0.9, top_p=0.95)
    model = llama()
    model.set_attn_implementation(attention)
    outputs = generate_batch(model, PROMPTS[:2], config, seed=SEEDS[:2], continuous_batching_config=batching())
    for prompt, seed, output in zip(PROMPTS, SEEDS, outputs):
        settings = config_of(temperature=0.9, top_p=0.95, eos_token_id=None, pad_token_id=0)
        options = {"generation_config": settings, "custom_generate": generate}
        ids = llama().generate(torch.tensor([prompt]), **options, seed=[seed])
        assert output.generated_tokens == ids[0, len(prompt) :].tolist()


def test_a_model_that_scales_its_logits():
    (output,) = generate_batch(granite(), PROMPTS[:1], config_of(), seed=[3], continuous_batching_config=batching())
    assert output.generated_tokens == drawn(granite(), PROMPTS[0], 3, 6)[0]
    assert output.generated_tokens != drawn(granite(), PROMPTS[0], 3, 6, temperature=8.0)[0]  # and the scale matters


def test_a_head_with_a_bias():
    model = llama()
    model.lm_head.bias = torch.nn.Parameter(3 * torch.randn(V, generator=torch.Generator().manual_seed(2)))
    settings = {"seed": [3], "continuous_batching_config": batching(return_logprobs=True)}
    (output,) = generate_batch(model, PROMPTS[:1], config_of(), **settings)
    tokens, logprobs = drawn(model, PROMPTS[0], 3, 6, bias=model.lm_head.bias)
    assert output.generated_tokens == tokens
    torch.testing.assert_close(output.logprobs, logprobs, rtol=0, atol=1e-4)
    assert tokens != drawn(model, PROMPTS[0], 3, 6)[0]


def results_of(manager, names):
    done: dict[str, list[int]] = {}
    until = time.monotonic() + 60
    while len(done) < len(names):
        assert time.monotonic() < until
        result = manager.get_result(timeout=1)
        if result is not None and result.is_finished():
            assert result.error is None
            done[result.request_id] = result.generated_tokens
    return done


ON_A_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs and asynchronous batches")


@pytest.mark.parametrize(
    ("device", "given"),
    [
        ("cpu", {}),
        pytest.param("cuda", {"use_cuda_graph": False}, marks=ON_A_GPU),
        pytest.param("cuda", {"use_cuda_graph": True}, marks=ON_A_GPU),
        pytest.param("cuda", {"use_cuda_graph": True, "use_async_batching": True}, marks=ON_A_GPU),
    ],
)
def test_requests_join_and_leave(device, given):
    """Prompts come in chunks, requests exceed a step, and each has its own length and parameters."""
    config = config_of(temperature=0.9, top_k=50, top_p=0.99)
    manager = FusedBatchingManager(
        llama().to(device), config, batching(max_batch_tokens=8, max_requests_per_batch=4, **given)
    )
    requests = {}
    for row in range(10):
        params = {"temperature": 0.5 + 0.2 * row, "top_k": 3 + row, "top_p": 0.8}
        requests[f"r{row}"] = (PROMPTS[row % 4], 100 + row, 2 + row % 5, params)
    requests["default"] = (PROMPTS[2], 77, 5, {})
    manager.warmup()
    manager.start()
    try:
        for row, (name, (prompt, seed, count, params)) in enumerate(requests.items()):
            manager.add_request(prompt, name, count, seed=seed, **params)
            if row % 3 == 0:
                time.sleep(0.05)  # others are on their way by then
        done = results_of(manager, requests)
        assert manager.undefined_rows == 0
    finally:
        manager.stop(block=True, timeout=5)
        manager.destroy()
    for name, (prompt, seed, count, params) in requests.items():
        params = params or {"temperature": 0.9, "top_k": 50, "top_p": 0.99}
        assert done[name] == drawn(llama().to(device), prompt, seed, count, **params)[0], name


def test_requests_without_a_seed_get_one_each():
    model = llama()
    model.lm_head.weight.data.zero_()
    outputs = generate_batch(model, [PROMPTS[0]] * 6, config_of(), continuous_batching_config=batching())
    assert len({tuple(output.generated_tokens) for output in outputs}) == 6


def test_the_model_says_where_sequences_end_if_the_configuration_does_not():
    """The end-of-sequence token is found as ``model.generate_batch`` finds it."""
    model = llama()
    whole, _ = drawn(model, PROMPTS[0], SEEDS[0], 6)
    model.config.eos_token_id = whole[2]
    given = {"seed": SEEDS[:1], "continuous_batching_config": batching()}
    (short,) = generate_batch(model, PROMPTS[:1], config_of(eos_token_id=None), **given)
    assert short.generated_tokens == whole[: whole.index(whole[2]) + 1]


def test_no_logits_are_made(monkeypatch):
    """The head is given no positions; the model as it was before and after gives logits."""
    model, rows = llama(), []
    linear = torch.nn.functional.linear

    def counted(input, weight, bias=None):
        if weight is model.lm_head.weight:
            rows.append(input.shape[:-1].numel())
        return linear(input, weight, bias)

    FusedBatchingManager(model, config_of(), batching()).destroy()  # which looks at the model once
    monkeypatch.setattr(torch.nn.functional, "linear", counted)
    generate_batch(model, PROMPTS, config_of(), continuous_batching_config=batching())
    assert len(rows) >= 6
    assert not any(rows)


def test_a_token_without_a_score():
    model = llama()
    manager = FusedBatchingManager(model, config_of(), batching())
    assert manager.undefined_rows == 0
    model.model.norm.weight.data.fill_(math.nan)
    manager.destroy()
    with pytest.raises(RuntimeError, match="6 tokens had no finite score"):
        generate_batch(model, PROMPTS[:1], config_of(), continuous_batching_config=batching())


def test_nothing_to_do():
    assert generate_batch(llama(), [], config_of()) == []


REFUSED = {
    "RepetitionPenaltyLogitsProcessor in continuous batching is not": {"repetition_penalty": 1.2},
    "TypicalLogitsWarper in continuous batching": {"typical_p": 0.5},
    "num_return_sequences must be 1": {"num_return_sequences": 2},
    "a configuration of beam_sample": {"num_beams": 3},
    "a configuration of assisted_generation": {"prompt_lookup_num_tokens": 2},
    "min_length is not done": {"min_length": 9},
    "max_time, stop_strings is not done": {"max_time": 1.0, "stop_strings": ["a"]},
    "compile_config is not done": {"compile_config": CompileConfig()},
    "output_scores is not done": {"return_dict_in_generate": True, "output_scores": True},
}


@pytest.mark.parametrize("words", REFUSED)
def test_configurations_that_are_refused(words):
    model = llama()
    with pytest.raises(ValueError, match=words):
        FusedBatchingManager(model, config_of(eos_token_id=2, **REFUSED[words]), batching())
    assert model.config._attn_implementation == "sdpa"  # as it was


def test_a_length_with_the_prompt_is_no_end():
    """transformers' continuous batching reads ``max_new_tokens`` alone."""
    manager = FusedBatchingManager(llama(), config_of(max_new_tokens=None, max_length=6), batching())
    with pytest.raises(ValueError, match=r"max_new_tokens must be given: .* max_length=6"):
        manager.add_request([5, 6], seed=1)
    assert manager.add_request([5, 6], None, 3, seed=1)
    assert manager.add_request([5, 6], max_new_tokens=3, seed=1)
    manager.destroy()


def test_what_else_is_refused(monkeypatch):
    for seed in (1, [1]):
        with pytest.raises(ValueError, match="seed must be one per prompt, 4, got"):
            generate_batch(llama(), PROMPTS, config_of(), seed=seed)
    manager = FusedBatchingManager(llama(), config_of(), batching())
    with pytest.raises(ValueError, match="seed must be None for 4 requests, which would share noise"):
        manager.add_requests(PROMPTS, seed=1)
    with pytest.raises(ValueError, match="seed must fit in 64 bits"):
        manager.add_request(PROMPTS[0], seed=2**64)
    for value in (-1.0, math.nan):  # the device would take it for greedy, or find no token
        with pytest.raises(ValueError, match="temperature must be at least 0"):
            manager.add_request(PROMPTS[0], temperature=value)
        with pytest.raises(ValueError, match="top_p must be from 0 to 1"):
            manager.add_requests(PROMPTS, top_p=value)
    for top_k in (0, -5, 2**31):  # 0 is greedy to transformers, and off everywhere else
        with pytest.raises(ValueError, match=r"top_k must be from 1 to 2\*\*31 - 1"):
            manager.add_request(PROMPTS[0], top_k=top_k)
    with pytest.raises(ValueError, match="input_ids must be one or more tokens, got none"):
        manager.add_request([])
    assert manager.input_queue.empty()
    manager.destroy()
    model = llama()
    model._device_mesh = object()
    with pytest.raises(ValueError, match="over several devices"):
        FusedBatchingManager(model, config_of(), batching())
    monkeypatch.setattr(continuous, "_SIGNATURES", ((continuous._check_release, "self"),))
    with pytest.raises(ValueError, match=r"_check_release of transformers .* takes , not self as that of 5\.23"):
        FusedBatchingManager(llama(), config_of(), batching())


def test_a_manager_that_is_not_made_or_not_started_leaves_the_model_as_it_was(monkeypatch):
    model = llama()
    model.set_attn_implementation("eager")  # which transformers makes one that needs a paged cache
    with pytest.raises(ValueError, match=r"torch\.compile of continuous batching's step"):
        FusedBatchingManager(model, config_of(), batching(varlen_compile_config=CompileConfig()))
    assert model.config._attn_implementation == "eager"
    FusedBatchingManager(model, config_of(), batching()).destroy()
    assert model.config._attn_implementation == "eager"

    def no_room(self):
        raise MemoryError("no room")

    monkeypatch.setattr(FusedBatchingManager, "warmup", no_room)
    with pytest.raises(MemoryError):
        generate_batch(model, PROMPTS, config_of(), continuous_batching_config=batching())
    assert model.config._attn_implementation == "eager"


def test_the_seed_of_the_continuous_batching_config():
    """For requests without one, as it is transformers' for all."""

    def tokens(seed):
        outputs = generate_batch(llama(), PROMPTS, config_of(), continuous_batching_config=batching(seed=seed))
        return [out.generated_tokens for out in outputs]

    assert tokens(5) == tokens(5) != tokens(6)


def test_a_continuous_batching_config_within_the_configuration():
    config = config_of()
    config.continuous_batching_config = batching(return_logprobs=True)
    assert all(len(out.logprobs) == 6 for out in generate_batch(llama(), PROMPTS, config))


def test_a_failed_request_is_an_error():
    with pytest.raises(RuntimeError, match=r"of 2 requests failed: prompt 0: index out of range"):
        generate_batch(llama(), [[1, 2], [V + 5]], config_of(), continuous_batching_config=batching())
