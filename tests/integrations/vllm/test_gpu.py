"""The plug-in in vLLM itself, on a GPU: a tiny model of random weights, in this process. Needs vLLM, and its entry
point.

With FLASHSAMPLING_VLLM_ON_CPU=1 on a CPU: what ``vllm_on_cpu`` says, but for compiling and waiting. With tensor
parallelism, an engine in the process of each rank: ``python -m torch.distributed.run --nproc_per_node 2 -m pytest
tests/integrations/vllm/test_gpu.py``.

Every fused draw is compared with ``flashsampling.sample`` of the row alone, with what the user asked for; the
distribution is compared with that of vLLM's sampler, which gets float32 logits here: its own are rounded to bfloat16
first.
"""

import collections
import dataclasses
import itertools
import logging
import os
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from . import on_cpu

if on_cpu.ASKED_FOR:
    on_cpu.pretend(pytest.MonkeyPatch())
elif not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)
os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "FLASHSAMPLING_VLLM": "require", "FLASHSAMPLING_VLLM_TP": "1"}
pytest.importorskip("vllm")
pytest.importorskip("scipy")

from scipy import stats

import flashsampling
from benchmarks.random_models import model_folder
from benchmarks.vllm_engine import Engine
from benchmarks.vllm_worker import spread_logits, use_plugin
from flashsampling.integrations.vllm import counters
from flashsampling.integrations.vllm.request_info import pack_mask
from flashsampling.param_parsers import MAX_BIASED

ON_CPU, RANKS = on_cpu.ASKED_FOR, int(os.environ.get("WORLD_SIZE", "1"))
pytestmark: Any = [] if ON_CPU else pytest.mark.gpu
OPTIONS: dict[str, Any] = on_cpu.OPTIONS if ON_CPU else {
    "attention_backend": os.environ.get("VLLM_TEST_ATTENTION", "FLASH_ATTN"),
    "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 8, 64]},
}  # fmt: skip
if RANKS > 1:
    OPTIONS |= {"tensor_parallel_size": RANKS, "distributed_executor_backend": "external_launcher"}
    OPTIONS |= {"disable_custom_all_reduce": True}
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
    "logprobs of more than 20 tokens": {"logprobs": 25},
    "more than 1024 tokens with a bias": {
        "logit_bias": dict.fromkeys(range(1000), 0.5), "min_tokens": 12, "stop_token_ids": [*range(900, 960)],
    },
    "a bias that is not finite": {"logit_bias": {3: float("-inf")}},
}  # fmt: skip


class Messages(logging.Handler):
    def __init__(self):
        super().__init__(logging.INFO)
        self.texts = []

    def emit(self, record):
        self.texts.append(record.getMessage())

    def noted(self, record):
        """Is a filter: vLLM 0.33 removes other handlers when it makes an engine."""
        self.emit(record)
        return True


@pytest.fixture(scope="module")
def messages():
    return Messages()


@pytest.fixture(scope="module")
def engine(messages):
    logging.getLogger("vllm.flashsampling").addFilter(messages.noted)
    engine = Engine(
        model_folder(512, 2, 8, 1024, False, V, 2, 64),
        max_model_len=512,
        max_num_seqs=64,
        max_num_batched_tokens=256,  # longer prompts come in chunks
        gpu_memory_utilization=0.2,
        enable_prefix_caching=True,
        logprobs_mode="raw_logprobs",
        max_logprobs=30,
        **OPTIONS,
    )
    logging.getLogger("vllm.flashsampling").removeFilter(messages.noted)
    logging.getLogger("vllm").addHandler(messages)
    engine.tell(spread_logits, 2.0)
    yield engine
    logging.getLogger("vllm").removeHandler(messages)


@pytest.fixture
def runner(engine):
    engine.tell(use_plugin, True)
    worker = engine.llm.llm_engine.engine_core.engine_core.model_executor.driver_worker
    return worker.model_runner


@pytest.fixture(scope="module")
def weight(engine):
    return whole_head(engine)


def whole_head(engine):
    """The LM head's weight, of all ranks."""
    from vllm.distributed import get_tp_group

    worker = engine.llm.llm_engine.engine_core.engine_core.model_executor.driver_worker
    return get_tp_group().all_gather(worker.model_runner.model.lm_head.weight.data, dim=0)


def params_of(engine, kind, **more):
    return engine.params(**{"max_tokens": 12, "ignore_eos": True, "detokenize": False, **(SERVED | LEFT)[kind], **more})


class Checked(collections.Counter[int | None]):
    """How many rows there were of every seed."""

    chunks = cached = reused = 0  # rows of a prompt's part; requests that found a prefix; that took another one's slot
    drafts = host_is_ahead = 0  # rows after a draft; rows for whose length the host counted drafts that did not hold

    def __init__(self):
        super().__init__()
        self.drawn: dict[tuple[int, ...], int] = {}  # tokens, by a request's seed and the tokens before


DRAWN: list[list[int]] = []


@pytest.fixture
def checked(runner, weight, monkeypatch):
    return watch(runner, weight, monkeypatch)


def watch(runner, weight, monkeypatch):
    """Compares every row of every fused draw with the row alone, after the drafts before it."""
    step, given, seen = runner.flashsampling.step, {}, Checked()
    add, draw, kept = step.add, step.draw, runner.req_states

    def adding(slot, params, prompt_len):
        seen.reused += slot in given
        seen.cached += bool(kept.num_computed_tokens_np[slot])
        given[slot] = params, prompt_len
        add(slot, params, prompt_len)

    def drawing(batch):
        out = draw(batch)
        if not ON_CPU:
            torch.cuda.synchronize()
        tokens, drafts = kept.all_token_ids.gpu, []
        firsts: dict[int, tuple[int, int]] = {}  # by slot: which request it is, and its first row
        if batch.drafts is not None:
            ids, bounds = batch.drafts.token_ids.tolist(), batch.drafts.bounds.tolist()
            drafts = [ids[begin:end] for begin, end in itertools.pairwise(bounds)]
        for row, slot in enumerate(batch.requests.tolist()):
            (params, prompt_len), position = given[slot], int(batch.positions[row])
            request, first = firsts.setdefault(slot, (len(firsts), row))
            ahead = int(batch.lengths[row]) - position - 1
            seen.host_is_ahead += ahead > 0
            if position + 1 < kept.prefill_len.np[slot]:
                seen.chunks += 1  # of which nothing is drawn
                continue
            if ahead and not step.most_drafts:
                raise AssertionError("the host's length is another than the device's")
            so_far = tokens[slot, : position + 1 - (row - first)].tolist()
            so_far += drafts[request][: row - first] if drafts else []
            seed = int(runner.sampler.sampling_states.seeds.np[slot])
            assert params.seed in (None, seed)
            mask = None
            if batch.grammar is not None and row in batch.grammar.rows:
                mask = batch.grammar.masks[batch.grammar.rows.tolist().index(row)]
            states, prompt, output = batch.hidden_states[row : row + 1], so_far[:prompt_len], so_far[prompt_len:]
            wanted = alone(weight, states, params, prompt, output, seed, mask)
            assert int(out[0].token_ids[row]) == int(wanted.token_ids), params
            if params.logprobs:
                got = out[0].top_logprobs[row, : params.logprobs]
                torch.testing.assert_close(got, wanted.top_logprobs[0], rtol=0, atol=1e-4)
            seen[params.seed] += 1
            seen.drawn[(seed, *so_far)] = int(wanted.token_ids)
            seen.drafts += row > first
        DRAWN.append(out[0].token_ids.tolist())
        return out

    monkeypatch.setattr(step, "add", adding)
    monkeypatch.setattr(step, "draw", drawing)
    return seen


def alone(weight, states, params, prompt, output, seed, grammar):
    """One row, from what the user wrote. As a call for everything, of which most is off: no other kernels are compiled
    for it, and what the step drew in one launch is held against what is drawn from logits in memory."""
    device = states.device
    bias = [*(params.logit_bias or {}).items()]
    if len(output) < params.min_tokens:
        bias += [(token, float("-inf")) for token in params.all_stop_token_ids]
    bias += [(-1, 0.0)] * (MAX_BIASED - len(bias))
    ids, values = zip(*bias)
    counts = flashsampling.TokenCounts(1, V, device)
    counts.reset(0, prompt)
    counts.add(torch.tensor([output], dtype=torch.int64, device=device))
    mask = pack_mask(V, params.allowed_token_ids, [word[0] for word in params.bad_words_token_ids or []])
    if grammar is not None:
        mask = mask & grammar[: len(mask)]
    reals = ("temperature", "top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty")
    return flashsampling.sample(
        states,
        weight,
        vocab_size=V,
        seed=torch.tensor([seed], device=device),
        offset=torch.tensor([len(prompt) + len(output) - 1], device=device),
        top_k=torch.tensor([params.top_k], dtype=torch.int32, device=device),
        **{name: torch.tensor([getattr(params, name)], dtype=torch.float32, device=device) for name in reals},
        logit_bias=(torch.tensor([ids], dtype=torch.int32, device=device), torch.tensor([values], device=device)),
        token_counts=counts.counts,
        token_mask=torch.from_numpy(mask[None]).to(device),
        return_logprobs=True,
        top_logprobs=max(params.logprobs or 0, 1),
    )


def prompts_of(count, length=9, seed=0):
    return np.random.default_rng(seed).integers(2, V, (count, length)).tolist()


def names_of_kernels():
    """All that Triton may compile of ours."""
    from triton.runtime.jit import JITFunction

    parts = ("triton", "integrations")
    modules = [
        module
        for name, module in [*sys.modules.items()]
        if name.startswith("flashsampling.") and any(p in name for p in parts)
    ]
    found = {name for module in modules for name, each in vars(module).items() if isinstance(each, JITFunction)}
    return {name for name in found if name.endswith("_kernel")}


def test_it_came_by_its_entry_point(engine, runner, messages):
    (line,) = [text for text in messages.texts if "are one step" in text]
    print(line)
    assert f"LM head ({V} tokens)" in line
    assert type(runner).__name__ == "FusedGPUModelRunner"
    assert "refused" not in engine.tell(counters)


@pytest.mark.skipif(ON_CPU, reason="nothing is compiled there")
def test_nothing_is_compiled_while_serving(engine, runner, messages):
    """Comes before anything else draws here. vLLM says so if a kernel of Triton or CuTe DSL is compiled."""
    messages.texts.clear()
    kinds = list(SERVED)
    for count in (1, 2, 5, 17, 33, 64):
        chosen = [kinds[(count + i) % len(kinds)] for i in range(count)]
        engine.generate(
            prompts_of(count), [params_of(engine, kind, seed=i, max_tokens=8) for i, kind in enumerate(chosen)]
        )
    for kind in kinds:
        engine.generate(prompts_of(3), [params_of(engine, kind, max_tokens=8) for _ in range(3)])
    compiled = [text for text in messages.texts if "compil" in text]
    print("\n".join(compiled))
    ours = {"cutedsl", *names_of_kernels()}
    assert {"filtered_sample_kernel", "counts_kernel", "sanitize_kernel"} < ours
    assert RANKS == 1 or {"row_max_kernel", "all_gather_kernel"} < ours
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
    more = {} if "logprobs" in LEFT[reason] else {"logprobs": 2}
    params = [
        params_of(engine, reason, **more),
        params_of(engine, "top_k", seed=1),
        params_of(engine, "logprobs", seed=2),
    ]
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
        (f"r{i}", long_prompts[i % 4] if i % 3 == 0 else prompts_of(1, 7, seed=i)[0], kinds[i % len(kinds)])
        for i in range(40)
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
    assert min(checked.chunks, checked.cached, checked.reused) > 0


def test_preempted_requests_resume(engine, runner, checked):
    """Penalties and ``min_tokens`` count the output so far: the tokens are those of requests that nobody stopped."""
    kinds = list(SERVED)
    params = [params_of(engine, kind, seed=i) for i, kind in enumerate(kinds)]
    prompts, core, tokens = prompts_of(len(kinds), seed=7), engine.llm.llm_engine, {}
    for name, prompt, asked in zip(kinds, prompts, params):
        core.add_request(name, {"prompt_token_ids": prompt}, asked)
    steps, resumed, preempted = 0, 0, 0
    while core.has_unfinished_requests():
        for output in core.step():
            tokens[output.request_id] = list(output.outputs[0].token_ids)
        steps += 1
        if steps in (3, 8):
            resumed += any(2 <= len(each) < 12 for each in tokens.values())
            preempted += core.get_num_unfinished_requests()
            assert core.reset_prefix_cache(reset_running_requests=True)
    assert resumed == 2
    assert checked.reused >= preempted > len(kinds)  # but for those that have ended by then
    alone = [list(output.token_ids) for output in engine.generate(prompts, params)]
    assert [tokens[kind] for kind in kinds] == alone


def test_a_grammar(engine, runner, checked, monkeypatch):
    """Masks for two rows of three, made up where vLLM's would come."""
    from vllm.v1.core.sched.output import GrammarOutput

    masks = np.stack([pack_mask(V, [5, 6, 31], []), pack_mask(V, [*range(0, V, 3)], [])])
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


def test_a_grammar_with_logprobs(engine, runner, checked, monkeypatch):
    """That row is vLLM's, the other one is drawn by its seed."""
    from vllm.v1.core.sched.output import GrammarOutput

    mask, original, before = pack_mask(V, [5, 6, 31], []), type(runner).sample, engine.tell(counters)

    def sample(self, hidden_states, input_batch, grammar_output):
        constrained = [name for name in input_batch.req_ids if seeds[name] == 0]
        return original(
            self, hidden_states, input_batch, GrammarOutput(constrained, np.stack([mask] * len(constrained)))
        )

    seeds, add = {}, type(runner).add_requests

    def adding(self, scheduler_output):
        seeds.update({new.req_id: new.sampling_params.seed for new in scheduler_output.scheduled_new_reqs})
        add(self, scheduler_output)

    monkeypatch.setattr(type(runner), "sample", sample)
    monkeypatch.setattr(type(runner), "add_requests", adding)
    outputs = engine.generate(prompts_of(2), [params_of(engine, "logprobs", seed=i) for i in range(2)])
    assert set(outputs[0].token_ids) <= {5, 6, 31}
    assert checked[1] == 12
    assert not checked[0]
    after = engine.tell(counters)
    assert after["split"] == before["split"] + 12
    assert after["reasons"]["logprobs with a grammar"] == 12
    assert all(len(each) >= 5 for output in outputs for each in output.logprobs)


def test_logprobs_are_vllms(engine, runner, weight, monkeypatch):
    monkeypatch.setattr(runner.model, "compute_logits", lambda states: (states.float() @ weight.float().T)[:, :V])
    found = []
    for plugin in (True, False):
        engine.tell(use_plugin, plugin)
        outputs = engine.generate(
            prompts_of(32), [params_of(engine, "greedy", logprobs=5, max_tokens=1) for _ in range(32)]
        )
        found.append(
            [{token: (each.logprob, each.rank) for token, each in output.logprobs[0].items()} for output in outputs]
        )
    for mine, theirs in zip(*found):
        assert mine.keys() == theirs.keys()
        for token, (logprob, rank) in theirs.items():
            assert abs(mine[token][0] - logprob) <= 1e-3
            assert mine[token][1] == rank


@pytest.mark.parametrize("kind", [kind for kind in SERVED if kind not in ("greedy", "logprobs", "min_tokens")])
def test_the_distribution_is_vllms(engine, runner, weight, monkeypatch, kind):
    """Two-sample chi-square over 2560 draws each, of one prompt; one in 10**6 would fail by chance. All draws of a row
    are of one step, at positions of their own: noise is another there, and nothing else is."""
    monkeypatch.setattr(runner.model, "compute_logits", lambda states: (states.float() @ weight.float().T)[:, :V])
    prompts, params = prompts_of(1) * 64, params_of(engine, kind, max_tokens=1)
    mine, theirs = (
        torch.cat(drawn_often(engine, runner, plugin, prompts, params, 40)).bincount(minlength=V).cpu().numpy()
        for plugin in (True, False)
    )
    order = np.argsort(-(mine + theirs))
    often = order[(mine + theirs)[order] >= 20]
    rest = np.setdiff1d(np.arange(V), often)
    table = np.stack([np.append(each[often], each[rest].sum()) for each in (mine, theirs)])
    table = table[:, table.sum(0) > 0]
    assert table.sum(1).tolist() == [2560, 2560]
    assert table.shape[1] > 1
    assert stats.chi2_contingency(table).pvalue > 1e-6
    if "allowed" in kind:
        assert not mine[np.setdiff1d(np.arange(V), SERVED[kind]["allowed_token_ids"])].any()


def drawn_often(engine, runner, plugin, prompts, params, times):
    """Returns what is drawn at the prompts' last positions, so many times: in every step as often, in the order of its
    rows."""
    engine.tell(use_plugin, plugin)
    original, drawn = type(runner).sample, []

    def sample(self, hidden_states, input_batch, grammar_output):
        for n in reversed(range(times)):  # the last one is the step's own
            moved = dataclasses.replace(input_batch, positions=input_batch.positions + 1000 * n)
            out = original(self, hidden_states, moved, grammar_output)
            drawn.append(out[0].sampled_token_ids[out[1] > 0].flatten())
        return out

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(runner), "sample", sample)
        engine.generate(prompts, [params] * len(prompts))
    return drawn


@pytest.mark.skipif(ON_CPU, reason="there is nothing to wait for")
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


@pytest.mark.skipif(RANKS == 1, reason="one rank")
def test_ranks_drew_the_same(engine):
    """In all of the tests above, step by step; what each was held against is of all shards."""
    check_ranks(engine)


def check_ranks(engine):
    from vllm.distributed import get_tp_group

    group, theirs = get_tp_group(), [None] * RANKS
    torch.distributed.all_gather_object(theirs, (DRAWN, engine.tell(counters)), group=group.cpu_group)
    assert DRAWN
    assert all(each == theirs[0] for each in theirs)


def test_counters_of_a_worker_without():
    assert counters(SimpleNamespace(model_runner=None)) == {"refused": "the plug-in is off, or was not loaded"}
