"""Drafts in vLLM itself: an engine that speculates, beside one that does not. As ``test_gpu``, on a GPU, or with
FLASHSAMPLING_VLLM_ON_CPU=1 on a CPU, or with several ranks; a process of its own, since it makes several engines.

The drafter is made up: it knows what is decoded without drafts, and errs now and then, so that any number of drafts
holds.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from . import test_gpu
from .test_gpu import LEFT, ON_CPU, OPTIONS, RANKS, SERVED, V, check_ranks, prompts_of, watch, whole_head

# that says where vLLM is to run
# isort: split

from benchmarks.random_models import model_folder
from benchmarks.vllm_engine import Engine
from benchmarks.vllm_worker import spread_logits
from flashsampling.integrations.vllm import counters
from flashsampling.integrations.vllm.request_info import pack_mask

pytestmark = test_gpu.pytestmark
MOST, LONG = 3, 24  # drafts of a request; tokens of a request
MODEL = (512, 2, 8, 1024, False, V, 2, 64)


class Knowing:
    """Stands in for vLLM's speculators."""

    supports_mm_inputs = False
    draft_logits = None
    model = torch.nn.Module()

    def __init__(self):
        self.texts, self.runner, self.rng = {}, None, np.random.default_rng(0)

    def init_cudagraph_manager(self, mode):
        pass

    def capture(self):
        pass

    def propose(self, input_batch, *_, dummy_run=False, **__):
        drafts = torch.zeros(input_batch.num_reqs, MOST, dtype=torch.int64)
        if self.runner is not None and not dummy_run:  # on a GPU vLLM warms up with requests of its own before
            states = self.runner.req_states
            for row, slot in enumerate(input_batch.idx_mapping_np.tolist()):
                prompt = states.all_token_ids.gpu[slot, : states.prompt_len.np[slot]].tolist()
                done = int(states.total_len.gpu[slot]) - len(prompt)
                next_ones = self.texts.get(tuple(prompt), [])[done : done + MOST]
                drafts[row, : len(next_ones)] = torch.tensor(next_ones)
            wrong = torch.from_numpy(self.rng.random(drafts.shape) < 0.2)
            drafts[wrong] = torch.from_numpy(self.rng.integers(0, V, int(wrong.sum())))
        return drafts.to(input_batch.logits_indices.device)


def engine_of(**more):
    engine = Engine(
        model_folder(*MODEL), max_model_len=512, max_num_seqs=32, max_num_batched_tokens=256,
        gpu_memory_utilization=0.2, enable_prefix_caching=True,
        logprobs_mode="raw_logprobs", max_logprobs=30, **OPTIONS, **more,
    )  # fmt: skip
    engine.tell(spread_logits, 2.0)
    return engine


# vLLM takes neither min_p nor logit_bias beside drafts
ASKED: dict[str, dict[str, Any]] = {
    name: {each: value for each, value in kind.items() if each not in ("min_p", "logit_bias")}
    for name, kind in SERVED.items()
}
KINDS = [name for name in SERVED if name not in ("min_p", "min_p_top_k", "bias", "many_biases")]
REQUESTS: list[tuple[list[int], str, int]] = [  # prompt, kind, seed
    (prompt, kind, i) for i, (prompt, kind) in enumerate(zip(prompts_of(2 * len(KINDS), 9), [*KINDS, *KINDS]))
]
LONG_PROMPTS = [(prompt, kind, 100 + i) for i, (prompt, kind) in enumerate(zip(prompts_of(4, 300, seed=1), KINDS))]
REQUESTS += LONG_PROMPTS  # in chunks


def params_of(engine, kind, **more):
    return engine.params(
        **{"max_tokens": LONG, "ignore_eos": True, "detokenize": False, **(ASKED | LEFT)[kind], **more}
    )


@pytest.fixture(scope="module")
def without():
    """Returns what is decoded without drafts, and the log-probabilities."""
    engine = engine_of()
    outputs = engine.generate(
        [prompt for prompt, *_ in REQUESTS], [params_of(engine, kind, seed=seed) for _, kind, seed in REQUESTS]
    )
    return {tuple(prompt): output for (prompt, *_), output in zip(REQUESTS, outputs)}


@pytest.fixture(scope="module")
def engine(without):
    from vllm.v1.worker.gpu import model_runner

    drafter = Knowing()
    drafter.texts = {prompt: list(output.token_ids) for prompt, output in without.items()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_runner, "init_speculator", lambda *_: drafter)
        folder = model_folder(*MODEL)
        config = {"method": "eagle3", "model": folder, "num_speculative_tokens": MOST}
        engine = engine_of(speculative_config=config)
    drafter.runner = runner_of(engine)
    return engine


def runner_of(engine):
    return engine.llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.model_runner


@pytest.fixture
def checked(engine, monkeypatch):
    return watch(runner_of(engine), whole_head(engine), monkeypatch)


def check_texts(requests, outputs, without, checked):
    """A GPU's hidden states change in their last bits with the batch, and then texts may; but not from what was
    drawn."""
    for (prompt, kind, seed), output in zip(requests, outputs):
        tokens = list(output.token_ids)
        assert tokens == [checked.drawn[(seed, *prompt, *tokens[:i])] for i in range(len(tokens))], kind
        if not ON_CPU:
            continue
        wanted = without[tuple(prompt)]
        assert list(output.token_ids) == list(wanted.token_ids), kind
        assert (output.logprobs is None) == (wanted.logprobs is None)
        for mine, theirs in zip(output.logprobs or [], wanted.logprobs or []):
            assert mine.keys() == theirs.keys()
            assert all(abs(mine[token].logprob - theirs[token].logprob) < 1e-3 for token in mine)


def test_tokens_are_those_without_drafts(engine, without, checked):
    """All kinds of requests, in mixed batches, with chunked prompts, draw the same tokens in fewer steps."""
    before = engine.tell(counters)
    outputs = engine.generate(
        [prompt for prompt, *_ in REQUESTS], [params_of(engine, kind, seed=seed) for _, kind, seed in REQUESTS]
    )
    after = engine.tell(counters)
    check_texts(REQUESTS, outputs, without, checked)
    assert (after["left"], after["split"]) == (before["left"], before["split"])
    assert after["drafts"] > before["drafts"]
    assert checked.drafts > 100
    assert checked.host_is_ahead or not runner_of(engine).vllm_config.scheduler_config.async_scheduling


def test_fewer_steps(engine, without, checked):
    """Alone, so that every step is seen: most drafts hold."""
    prompt, kind, seed = REQUESTS[0]
    before = engine.tell(counters)["fused"]
    (output,) = engine.generate([prompt], [params_of(engine, kind, seed=seed)])
    check_texts(REQUESTS[:1], [output], without, checked)
    assert engine.tell(counters)["fused"] - before < LONG * 0.7


def test_requests_that_join_and_leave(engine, without, checked):
    core, done, running, waiting, steps = engine.llm.llm_engine, {}, [], list(enumerate(REQUESTS)), 0
    while waiting or core.has_unfinished_requests():
        for i, (prompt, kind, seed) in waiting[:4]:
            core.add_request(str(i), {"prompt_token_ids": prompt}, params_of(engine, kind, seed=seed))
            running.append(str(i))
        waiting = waiting[4:]
        steps += 1
        if steps % 3 == 0 and running:
            core.abort_request([running.pop(0)])
        for output in core.step():
            if output.finished:
                done[int(output.request_id)] = output.outputs[0]
                running = [name for name in running if name != output.request_id]
    assert len(done) > 15
    check_texts([REQUESTS[i] for i in done], done.values(), without, checked)
    assert checked.drafts > 100


def test_a_grammar(engine, checked, monkeypatch):
    """A mask for every row of a request, made up where vLLM's would come."""
    from vllm.v1.core.sched.output import GrammarOutput

    runner = runner_of(engine)
    original, evens = type(runner).sample, [pack_mask(V, [*range(i, V, 2)], []) for i in range(2)]

    def sample(self, hidden_states, input_batch, grammar_output):
        rows = np.diff(input_batch.cu_num_logits_np)
        positions = input_batch.positions[input_batch.logits_indices].tolist()
        first = int(rows[0])
        masks = np.stack([evens[position % 2] for position in positions[:first]])
        return original(self, hidden_states, input_batch, GrammarOutput([input_batch.req_ids[0]], masks))

    monkeypatch.setattr(type(runner), "sample", sample)
    (output,) = engine.generate(prompts_of(1), [params_of(engine, "plain", seed=1)])
    assert all(token % 2 == (8 + i) % 2 for i, token in enumerate(output.token_ids))  # 9 tokens before the first
    assert checked.drafts > 10


@pytest.mark.parametrize("reason", ["logprob_token_ids", "bad words of several tokens"])
def test_what_is_left_to_vllm(engine, without, checked, reason):
    """vLLM gets such a request with its drafts. Beside a seed the batch is split, and the seed's tokens stay."""
    before = engine.tell(counters)
    (output,) = engine.generate(prompts_of(1, seed=7), [params_of(engine, reason)])
    assert len(output.token_ids) == LONG
    after = engine.tell(counters)
    assert after["left"] > before["left"]
    assert after["drafts"] == before["drafts"]
    chosen = [REQUESTS[i] for i in (0, KINDS.index("repetition"), KINDS.index("logprobs"))]
    outputs = engine.generate(
        [*prompts_of(1, seed=7), *(prompt for prompt, *_ in chosen)],
        [params_of(engine, reason), *(params_of(engine, kind, seed=seed) for _, kind, seed in chosen)],
    )
    check_texts(chosen, outputs[1:], without, checked)
    last = engine.tell(counters)
    assert last["split"] > after["split"]
    assert last["drafts"] > after["drafts"]


@pytest.fixture(scope="module")
def with_eagle3(without):
    """An engine with a drafter of vLLM's, of random weights, which reads two of the target's layers."""
    config = Path(model_folder(*MODEL), "config.json")
    drafter = json.loads(config.read_text()) | {"num_hidden_layers": 1, "eagle_aux_hidden_state_layer_ids": [0, 1]}
    config.write_text(json.dumps(drafter))
    return engine_of(
        speculative_config={"method": "eagle3", "model": str(config.parent), "num_speculative_tokens": MOST}
    )


def test_a_drafter_of_vllms(with_eagle3, without, monkeypatch):
    """Its drafts are hardly ever right; the tokens are those without them."""
    assert type(runner_of(with_eagle3).speculator).__name__ == "EagleSpeculator"
    seen = watch(runner_of(with_eagle3), whole_head(with_eagle3), monkeypatch)
    outputs = with_eagle3.generate(
        [prompt for prompt, *_ in REQUESTS], [params_of(with_eagle3, kind, seed=seed) for _, kind, seed in REQUESTS]
    )
    check_texts(REQUESTS, outputs, without, seen)
    counted = with_eagle3.tell(counters)
    assert seen.drafts > 100
    assert counted["drafts"] > 0
    assert (counted["left"], counted["split"]) == (0, 0)


@pytest.mark.skipif(RANKS == 1, reason="one rank")
def test_ranks_drew_the_same(with_eagle3):
    """In all of the tests above."""
    check_ranks(with_eagle3)


@pytest.mark.skipif(ON_CPU, reason="there is nothing to wait for")
def test_nothing_waits_for_the_device(engine, monkeypatch):
    runner, before = runner_of(engine), engine.tell(counters)
    original = type(runner).sample

    def sample(*args: Any):
        torch.cuda.set_sync_debug_mode("error")
        try:
            return original(*args)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(type(runner), "sample", sample)
    engine.generate(
        [prompt for prompt, *_ in REQUESTS], [params_of(engine, kind, seed=seed) for _, kind, seed in REQUESTS]
    )
    assert engine.tell(counters)["drafts"] > before["drafts"]
