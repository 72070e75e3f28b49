"""The plug-in in vLLM itself, on a GPU: a tiny model of random weights, in this process. Needs vLLM, and its entry point.

Every fused draw is compared with ``flashsampling.sample`` of the row alone, with what the user asked for; the distribution is
compared with that of vLLM's sampler, which gets float32 logits here: its own are rounded to bfloat16 first.
"""

import collections
import logging
import os
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import flashsampling
from benchmarks.vllm_engine import Engine, model_folder
from benchmarks.vllm_worker import spread_logits, use_plugin
from flashsampling.integrations.vllm import counters
from flashsampling.integrations.vllm.slots import mask_of

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ["FLASHSAMPLING_VLLM"] = "require"
pytest.importorskip("vllm")
stats = pytest.importorskip("scipy.stats")

V = 1003
EVEN = [*range(0, V, 2)]
SERVED: dict[str, dict[str, Any]] = {
    "plain": {},
    "hot": {"temperature": 1.9},
    "greedy": {"temperature": 0.0},
    "top_k": {"top_k": 9},
    "top_p": {"top_p": 0.6},
    "top_k_top_p": {"top_k": 40, "top_p": 0.7},
    "min_p": {"min_p": 0.1},
    "min_p_top_k": {"min_p": 0.02, "top_k": 30},
    "repetition": {"repetition_penalty": 2.0},
    "frequency": {"frequency_penalty": 1.5, "presence_penalty": -2.0, "temperature": 0.7},
    "bias": {"logit_bias": {4: 3.0, 1002: 5.0, 31: -100.0}},
    "many_biases": {"logit_bias": {token: 0.05 * (token % 50) for token in range(200)}},
    "allowed": {"allowed_token_ids": [3, 31, 32, 700, 1002]},
    "bad_words": {"_bad_words_token_ids": [[token] for token in EVEN[:100]]},
    "min_tokens": {"min_tokens": 6, "stop_token_ids": [*range(100, 160)], "ignore_eos": False},
    "logprobs": {"logprobs": 5, "top_k": 50},
    "everything": {
        "temperature": 1.7, "top_k": 50, "min_p": 0.01, "repetition_penalty": 1.3, "frequency_penalty": 0.2,
        "presence_penalty": 0.1, "logit_bias": {9: 2.0}, "allowed_token_ids": EVEN, "_bad_words_token_ids": [[8], [12]],
        "logprobs": 3,
    },
}  # fmt: skip
LEFT: dict[str, dict[str, Any]] = {
    "bad words of several tokens": {"_bad_words_token_ids": [[3, 4]]},
    "min_p with top_p": {"min_p": 0.1, "top_p": 0.9},
    "logprob_token_ids": {"logprob_token_ids": [3, 4]},
}


class Messages(logging.Handler):
    def __init__(self):
        super().__init__(logging.INFO)
        self.texts = []

    def emit(self, record):
        self.texts.append(record.getMessage())


@pytest.fixture(scope="module")
def messages():
    return Messages()


@pytest.fixture(scope="module")
def engine(messages):
    logging.getLogger("vllm").addHandler(messages)
    engine = Engine(
        model_folder(512, 2, 8, 1024, False, V, 2, 64),
        max_model_len=512,
        max_num_seqs=64,
        max_num_batched_tokens=256,  # longer prompts come in chunks
        gpu_memory_utilization=0.2,
        enable_prefix_caching=True,
        attention_backend=os.environ.get("VLLM_TEST_ATTENTION", "FLASH_ATTN"),
        compilation_config={"mode": 0, "cudagraph_capture_sizes": [1, 8, 64]},
        logprobs_mode="raw_logprobs",
    )
    engine.tell(spread_logits, 2.0)
    yield engine
    logging.getLogger("vllm").removeHandler(messages)


@pytest.fixture
def runner(engine):
    engine.tell(use_plugin, True)
    worker = engine.llm.llm_engine.engine_core.engine_core.model_executor.driver_worker
    return worker.model_runner


def params_of(engine, kind, **more):
    return engine.params(**{"max_tokens": 12, "ignore_eos": True, "detokenize": False, **(SERVED | LEFT)[kind], **more})


@pytest.fixture
def checked(runner, monkeypatch):
    """Every row of every fused draw is compared with the row alone; how many there were of every seed."""
    step, given = runner.flashsampling.step, {}
    seen: collections.Counter[int | None] = collections.Counter()
    add, draw, kept = step.add, step.draw, runner.req_states

    def adding(slot, params, prompt_len):
        given[slot] = params, prompt_len
        add(slot, params, prompt_len)

    def drawing(batch):
        out = draw(batch)
        torch.cuda.synchronize()
        lengths, tokens = batch.lengths.tolist(), kept.all_token_ids.gpu
        for row, slot in enumerate(batch.slots.tolist()):
            params, prompt_len = given[slot]
            if lengths[row] < kept.prefill_len.np[slot]:
                continue  # a part of a prompt, of which nothing is drawn
            if lengths[row] != int(batch.positions[row]) + 1:
                raise AssertionError("the host's length is another than the device's")
            so_far = tokens[slot, : lengths[row]].tolist()
            seed = int(runner.sampler.sampling_states.seeds.np[slot])
            assert params.seed in (None, seed)
            mask = None
            if batch.grammar is not None and row in batch.grammar[0]:
                mask = batch.grammar[1][batch.grammar[0].tolist().index(row)]
            wanted = alone(
                step, batch.hidden_states[row : row + 1], params, so_far[:prompt_len], so_far[prompt_len:], seed, mask
            )
            assert int(out[0].token_ids[row]) == max(int(wanted.token_ids), 0), params
            if params.logprobs:
                torch.testing.assert_close(
                    out[0].top_logprobs[row, : params.logprobs], wanted.top_logprobs[0], rtol=0, atol=1e-4
                )
            seen[params.seed] += 1
        return out

    monkeypatch.setattr(step, "add", adding)
    monkeypatch.setattr(step, "draw", drawing)
    return seen


def alone(step, states, params, prompt, output, seed, grammar):
    """As tests/test_vllm.py has it: of one row, from what the user wrote."""
    device, request = states.device, {"top_k": params.top_k, "top_p": params.top_p, "min_p": params.min_p}
    dense = torch.zeros(V)
    for token, value in (params.logit_bias or {}).items():
        dense[token] += value
    if len(output) < params.min_tokens:
        dense[sorted(params.all_stop_token_ids)] = float("-inf")
    request["logit_bias"] = dense.to(device)
    if (params.repetition_penalty, params.frequency_penalty, params.presence_penalty) != (1.0, 0.0, 0.0):
        counts = flashsampling.TokenCounts(1, V, device)
        counts.reset(0, prompt)
        counts.add(torch.tensor([output], dtype=torch.int64, device=device))
        request["token_counts"] = counts.counts
        request |= {n: getattr(params, n) for n in ("repetition_penalty", "frequency_penalty", "presence_penalty")}
    mask = mask_of(V, params.allowed_token_ids, [word[0] for word in params.bad_words_token_ids or []])
    if grammar is not None:
        mask = mask & grammar[: len(mask)]
    request["token_mask"] = torch.from_numpy(mask).to(device)
    if params.logprobs:
        request |= {"return_logprobs": True, "top_logprobs": params.logprobs}
    rows = {"temperature": params.temperature, "seed": seed, "offset": len(prompt) + len(output) - 1}
    return flashsampling.sample(states, step.head.weight, vocab_size=V, **rows, **request)


def prompts_of(count, length=9, seed=0):
    return np.random.default_rng(seed).integers(2, V, (count, length)).tolist()


def test_it_came_by_its_entry_point(engine, runner, messages):
    (line,) = [text for text in messages.texts if "are one step" in text]
    print(line)
    assert f"LM head ({V} tokens)" in line
    assert type(runner).__name__ == "FusedGPUModelRunner"
    assert "refused" not in engine.tell(counters)


def test_nothing_is_compiled_while_serving(engine, runner, messages):
    """Comes before anything else draws here. vLLM says so if a kernel of Triton or CuTe DSL is compiled."""
    messages.texts.clear()
    kinds = list(SERVED)
    for count in (1, 2, 5, 17, 33, 64):
        chosen = [kinds[(count + i) % len(kinds)] for i in range(count)]
        engine.generate(prompts_of(count), [params_of(engine, kind, seed=i, max_tokens=8) for i, kind in enumerate(chosen)])
    for kind in kinds:
        engine.generate(prompts_of(3), [params_of(engine, kind, max_tokens=8) for _ in range(3)])
    compiled = [text for text in messages.texts if "compil" in text]
    print("\n".join(compiled))
    ours = ("scan_kernel", "pick_kernel", "counts_kernel", "settle_kernel", "products", "sample_kernel", "cutedsl")
    assert not [text for text in compiled if any(name in text.lower() for name in ours)]


def test_all_kinds_in_one_batch(engine, runner, checked):
    before = engine.tell(counters)
    kinds = [kind for _ in range(3) for kind in SERVED]
    params = [params_of(engine, kind, seed=i) for i, kind in enumerate(kinds)]
    outputs = engine.generate(prompts_of(len(kinds)), params)
    after = engine.tell(counters)
    assert after["fused"] > before["fused"]
    assert (after["left"], after["split"]) == (before["left"], before["split"])
    assert all(checked[i] >= len(output.token_ids) for i, output in enumerate(outputs))
    stops = [list(output.token_ids) for kind, output in zip(kinds, outputs) if kind == "min_tokens"]
    assert all(not 100 <= token < 160 for tokens in stops for token in tokens[:6])
    assert all(
        token in SERVED["allowed"]["allowed_token_ids"]
        for k, o in zip(kinds, outputs)
        if k == "allowed"
        for token in o.token_ids
    )


@pytest.mark.parametrize("kind", SERVED)
def test_a_kind_alone(engine, checked, kind):
    engine.generate(prompts_of(3), [params_of(engine, kind, seed=i) for i in range(3)])
    assert sum(checked.values()) >= 3 * 6


@pytest.mark.parametrize("reason", LEFT)
def test_what_is_left_to_vllm(engine, runner, checked, reason):
    """Alone it is vLLM's, beside a seed the batch is split."""
    before = engine.tell(counters)
    engine.generate(prompts_of(2), [params_of(engine, reason), params_of(engine, "plain")])
    after = engine.tell(counters)
    assert after["left"] > before["left"]
    assert after["fused"] == before["fused"]
    assert after["reasons"][reason] > before["reasons"].get(reason, 0)
    params = [params_of(engine, reason, logprobs=2), params_of(engine, "top_k", seed=1), params_of(engine, "logprobs", seed=2)]
    outputs = engine.generate(prompts_of(3), params)
    last = engine.tell(counters)
    assert last["split"] > after["split"]
    assert checked[1] >= 12
    assert len(outputs[2].logprobs[0]) >= 5


def test_requests_that_join_and_leave(engine, runner, checked):
    """Chunked prompts, cached prefixes, an abort, a slot used again, step by step."""
    core, kinds, done = engine.llm.llm_engine, list(SERVED), {}
    long_prompts = prompts_of(4, 400, seed=5)
    waiting = [
        (f"r{i}", long_prompts[i % 4] if i % 3 == 0 else prompts_of(1, 7, seed=i)[0], kinds[i % len(kinds)]) for i in range(40)
    ]
    running, steps = [], 0
    while waiting or core.has_unfinished_requests():
        for name, prompt, kind in waiting[:3]:
            core.add_request(name, {"prompt_token_ids": prompt}, params_of(engine, kind, seed=len(waiting)))
            running.append(name)
        waiting = waiting[3:]
        steps += 1
        if steps % 4 == 0 and running:
            core.abort_request([running.pop(0)])
        for output in core.step():
            if output.finished:
                done[output.request_id] = output
                running = [name for name in running if name != output.request_id]
    assert len(done) > 20
    assert sum(checked.values()) > 200


def test_a_grammar(engine, runner, checked, monkeypatch):
    """Masks for two rows of three, made up where vLLM's would come."""
    from vllm.v1.core.sched.output import GrammarOutput

    masks = np.stack([mask_of(V, [5, 6, 31], []), mask_of(V, [*range(0, V, 3)], [])])
    original = type(runner).sample

    def sample(self, hidden_states, input_batch, grammar_output):
        return original(
            self, hidden_states, input_batch, GrammarOutput([input_batch.req_ids[2], input_batch.req_ids[0]], masks)
        )

    monkeypatch.setattr(type(runner), "sample", sample)
    outputs = engine.generate(prompts_of(3), [params_of(engine, "plain", seed=i) for i in range(3)])
    drawn = [set(output.token_ids) for output in outputs]
    assert sum(tokens <= {5, 6, 31} for tokens in drawn) == 1
    assert sum(all(token % 3 == 0 for token in tokens) for tokens in drawn) == 1


def test_logprobs_are_vllms(engine, runner, monkeypatch):
    monkeypatch.setattr(
        runner.model, "compute_logits", lambda states: (states.float() @ runner.model.lm_head.weight.float().T)[:, :V]
    )
    found = []
    for plugin in (True, False):
        engine.tell(use_plugin, plugin)
        outputs = engine.generate(prompts_of(32), [params_of(engine, "greedy", logprobs=5, max_tokens=1) for _ in range(32)])
        found.append([{token: (each.logprob, each.rank) for token, each in output.logprobs[0].items()} for output in outputs])
    for mine, theirs in zip(*found):
        assert mine.keys() == theirs.keys()
        for token, (logprob, rank) in theirs.items():
            assert abs(mine[token][0] - logprob) <= 1e-3
            assert mine[token][1] == rank


@pytest.mark.parametrize("kind", [kind for kind in SERVED if kind not in ("greedy", "logprobs", "min_tokens")])
def test_the_distribution_is_vllms(engine, runner, monkeypatch, kind):
    """Two-sample chi-square over 2560 draws each, of one prompt; one in 10**6 would fail by chance."""
    monkeypatch.setattr(
        runner.model, "compute_logits", lambda states: (states.float() @ runner.model.lm_head.weight.float().T)[:, :V]
    )
    counts = []
    for plugin in (True, False):
        engine.tell(use_plugin, plugin)
        drawn = []
        for _ in range(40):
            outputs = engine.generate(
                prompts_of(1) * 64, [params_of(engine, kind, max_tokens=1, logprobs=None) for _ in range(64)]
            )
            drawn += [output.token_ids[0] for output in outputs]
        counts.append(np.bincount(drawn, minlength=V))
    mine, theirs = counts
    order = np.argsort(-(mine + theirs))
    often = order[(mine + theirs)[order] >= 20]
    rest = np.setdiff1d(np.arange(V), often)
    table = np.stack([np.append(each[often], each[rest].sum()) for each in counts])
    table = table[:, table.sum(0) > 0]
    assert table.shape[1] > 1
    assert stats.chi2_contingency(table).pvalue > 1e-6
    if "allowed" in kind:
        assert not mine[np.setdiff1d(np.arange(V), SERVED[kind]["allowed_token_ids"])].any()


def test_nothing_waits_for_the_device(engine, runner, monkeypatch):
    original = type(runner).sample

    def sample(*args):
        torch.cuda.set_sync_debug_mode("error")
        try:
            return original(*args)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(type(runner), "sample", sample)
    kinds = list(SERVED)
    before = engine.tell(counters)["fused"]
    engine.generate(prompts_of(len(kinds)), [params_of(engine, kind, seed=1) for kind in kinds])
    assert engine.tell(counters)["fused"] > before


def test_counters_of_a_worker_without():
    assert counters(SimpleNamespace(model_runner=None)) == {"refused": "the plug-in is off, or was not loaded"}
