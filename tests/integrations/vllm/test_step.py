"""The plug-in for vLLM, on a model runner that is made up: who does a step, with whose parameters, and what comes of
it."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import is_tensor

import flashsampling
from flashsampling import ops
from flashsampling.exchange_protocol import WHOLE
from flashsampling.inputs import SampleInputs
from flashsampling.integrations.engine import step as engine_step
from flashsampling.integrations.engine.graphs import Graphs
from flashsampling.integrations.engine.head import Layers
from flashsampling.integrations.engine.kernel_variants import FILTERS, PENALTIES, default_rows
from flashsampling.integrations.engine.request_info import FallbackReason, RequestState
from flashsampling.integrations.vllm import counters
from flashsampling.integrations.vllm.batches import convert_batch
from flashsampling.integrations.vllm.head import find_head
from flashsampling.integrations.vllm.request_info import VllmRules, pack_mask
from flashsampling.integrations.vllm.runner import FusedRunner, Vllm, VllmSampler
from flashsampling.integrations.vllm.step import Grammar, VllmStep
from flashsampling.outputs import SampleResult
from flashsampling.param_parsers import BatchShape
from flashsampling.sampling_params import parse_sampling_params
from flashsampling.token_counts import num_token_groups

from . import fakes
from .fakes import LEFT, SamplingParams

V, D, SLOTS = 331, 16, 8
LAYERS = Layers(fakes.Processor, fakes.Embedding, fakes.Unquantized)
PROMPT = [5, 31, 7, 7]
SCALED = {"scale": 0.5, "soft_cap": 3.0}  # of a logits processor
VLLM = Vllm(fakes.SamplerOutput, fakes.LogprobsTensors, fakes.get_num_sampled_and_rejected)


class Whole(FusedRunner, fakes.Runner):
    """The class that ``attach`` makes."""


class GraphsOnCpu(Graphs):
    """Behaves as CUDA graphs do: recording draws nothing, a replay reads fixed memory and overwrites the same
    outputs."""

    replays = 0

    def _record(self, work):
        _, _, params = work.args  # what a replay reads stays where it is, or is kept beside it
        mine = [
            tensor.untyped_storage().data_ptr()
            for tensor in (*vars(self).values(), *self._packed.values())
            if is_tensor(tensor)
        ]
        read = [getattr(params, name) for name in params._fields if name not in ("counts", "bias_ids", "bias_values")]
        assert all(tensor.untyped_storage().data_ptr() in mine for tensor in read if is_tensor(tensor))
        drawn = SampleResult(*(None if part is None else torch.full_like(part, -7) for part in work()))

        def replay():
            self.replays += 1
            for held, now in zip(drawn, work(), strict=True):
                if held is not None:
                    held.copy_(now)

        return replay, drawn


def graphs_of(slots, group=None):
    return GraphsOnCpu(slots, D, torch.float32, torch.device("cpu"), V, group)


def runner_of(model=None, free=None, logprobs_mode="raw_logprobs", vocab_size=V, most_drafts=0, graphs=False):
    model = fakes.Model(vocab_size, D) if model is None else model
    head = find_head(model, D, torch.float32, torch.device("cpu"), LAYERS)
    sampler = fakes.Sampler(SLOTS, vocab_size, logprobs_mode)
    # slots in an order of their own: a row number is never its slot's number
    runner = Whole(model, sampler, [0, 3, 1, 7, 4, 6, 2, 5] if free is None else free)
    rules = VllmRules(vocab_size, raw_logprobs=logprobs_mode == "raw_logprobs")
    runner.num_speculative_steps = most_drafts
    recorded = graphs_of(SLOTS) if graphs else None
    step = VllmStep(head, sampler, RequestState(SLOTS, rules), runner.device, None, most_drafts, recorded)
    runner.flashsampling = VllmSampler(step, VLLM)
    return runner


def states_of(batch):
    """Hidden states of all tokens and of the padding, of which every row is another."""
    return torch.randn(batch.num_tokens + 3, D, generator=torch.Generator().manual_seed(batch.num_tokens))


def grammar_of(names, bits):
    """Masks of these bits for requests with these names; two words wider than the vocabulary, as vLLM's may be."""
    words = [pack_mask(V, bits[name].nonzero()[:, 0].tolist(), []) for name in names]
    return fakes.GrammarOutput(names, np.pad(np.stack(words), ((0, 0), (0, 2))))


def expected(runner, states, params, prompt=(), output=(), position=0, mask=None, **more):
    """The one row by ``flashsampling.sample``, from what the user wrote: no slots, mixes or tensors of vLLM."""
    head = runner.flashsampling.step.head
    request = {"top_k": params.top_k, "top_p": params.top_p, "min_p": params.min_p, **head.arguments(), **more}
    dense = torch.zeros(V)
    for token, value in (params.logit_bias or {}).items():
        dense[token] = value
    if position + 1 < len(prompt) + params.min_tokens:
        dense[list(params.all_stop_token_ids)] = float("-inf")
    request["logit_bias"] = dense
    if (params.repetition_penalty, params.frequency_penalty, params.presence_penalty) != (1.0, 0.0, 0.0):
        counts = flashsampling.TokenCounts(1, V)
        counts.reset(0, list(prompt))
        counts.add(torch.tensor([list(output)], dtype=torch.int64))
        request["token_counts"] = counts.counts
        request |= {n: getattr(params, n) for n in ("repetition_penalty", "frequency_penalty", "presence_penalty")}
    allowed = torch.ones(V, dtype=torch.bool) if mask is None else mask.clone()
    if params.allowed_token_ids:
        allowed &= torch.isin(torch.arange(V), torch.tensor(params.allowed_token_ids))
    for (token,) in params.bad_words_token_ids or []:
        allowed[token] = False
    words = pack_mask(V, allowed.nonzero()[:, 0].tolist(), [])  # of no token it allows all
    request["token_mask"] = torch.from_numpy(words * bool(allowed.any()))
    if params.logprobs is not None:
        request |= {"return_logprobs": True, "top_logprobs": params.logprobs}
    rows = {"temperature": params.temperature, "seed": params.seed or 0, "offset": position, "vocab_size": V}
    return flashsampling.sample(states[None], head.weight, **rows, **request)


SERVED = {
    "plain": SamplingParams(seed=1),
    "hot": SamplingParams(seed=2, temperature=3.5),
    "greedy": SamplingParams(temperature=0.0),
    "top_k": SamplingParams(seed=3, top_k=5),
    "top_p": SamplingParams(seed=4, top_p=0.5, temperature=2.0),
    "top_k_top_p": SamplingParams(seed=-5, top_k=7, top_p=0.8, temperature=2.0),
    "min_p": SamplingParams(seed=6, min_p=0.2, temperature=2.0),
    "repetition": SamplingParams(seed=7, repetition_penalty=3.0, temperature=0.7),
    "frequency": SamplingParams(seed=2**63 - 1, frequency_penalty=1.5, presence_penalty=-2.0),
    "penalised_top_k": SamplingParams(seed=8, repetition_penalty=1.5, presence_penalty=0.5, top_k=9, temperature=2.0),
    "bias": SamplingParams(seed=9, logit_bias={4: 3.0, 330: 5.0, 31: -100.0}),
    "many_biases": SamplingParams(seed=10, logit_bias={token: 0.1 * (token % 50) for token in range(100)}),
    "allowed": SamplingParams(seed=11, allowed_token_ids=[3, 31, 32, 330]),
    "bad_words": SamplingParams(seed=12, temperature=0.0, bad_words_token_ids=[[token] for token in range(0, V, 2)]),
    "min_tokens": SamplingParams(
        seed=13, min_tokens=2, stop_token_ids=[*range(100, 160)], logit_bias={120: 40.0, 200: 20.0}
    ),
    "logprobs": SamplingParams(seed=14, logprobs=5, top_k=20),
    "logprobs_0": SamplingParams(seed=15, logprobs=0),
    "everything": SamplingParams(
        seed=16, temperature=1.7, top_k=50, min_p=0.01, repetition_penalty=1.3, frequency_penalty=0.2,
        presence_penalty=0.1, logit_bias={9: 2.0}, allowed_token_ids=[*range(0, V, 3)], bad_words_token_ids=[[9], [12]],
        min_tokens=1, stop_token_ids=[15], logprobs=3,
    ),
}  # fmt: skip
LEFT_TO_VLLM = {
    "logprobs of more than 20 tokens": SamplingParams(logprobs=21),
    "logprob_token_ids": SamplingParams(logprob_token_ids=[3]),
    "bad words of several tokens": SamplingParams(bad_words_token_ids=[[3], [4, 5], []]),
    "min_p with top_p": SamplingParams(min_p=0.1, top_p=0.9),
    "more than 1024 tokens with a bias": SamplingParams(logit_bias=dict.fromkeys(range(1025), 1.0)),
    "a bias that is not finite": SamplingParams(logit_bias={3: float("inf")}),
    "thinking_token_budget": SamplingParams(thinking_token_budget=0),
}


def check_rows(runner, batch, states, output, requests, outputs=None, masks=None):
    """Every row against the request alone."""
    outputs = outputs or {}
    for row, name in enumerate(batch.req_ids):
        prompt, params = requests[name]
        where = int(batch.logits_indices[row])
        position = int(batch.positions[where])
        mask = None if masks is None else masks.get(name)
        wanted = expected(runner, states[where], params, prompt, outputs.get(name, ()), position, mask)
        slot = runner.req_states.req_id_to_index[name]
        what = f"{name} in slot {slot}, whose requests were {runner.taken[slot]}, in the batch {batch.req_ids}"
        # 0 in place of none
        assert output.sampled_token_ids[row].tolist() == wanted.token_ids.clamp(min=0).tolist(), what
        if params.logprobs is not None:
            got, n = output.logprobs_tensors, params.logprobs
            assert got.logprob_token_ids[row, 0] == wanted.token_ids[0]
            torch.testing.assert_close(got.logprobs[row, :1], wanted.logprobs, rtol=0, atol=1e-5)
            assert got.selected_token_ranks[row] == wanted.ranks[0]
            if n:
                assert got.logprob_token_ids[row, 1 : n + 1].tolist() == wanted.top_token_ids[0].tolist()
                torch.testing.assert_close(got.logprobs[row, 1 : n + 1], wanted.top_logprobs[0], rtol=0, atol=1e-5)


def step_and_check(runner, tokens, requests, masks=None, grammar=None, outputs=None):
    """A step with so many tokens of each request, or one of each; its output, of which every row is checked."""
    batch = runner.batch(tokens if isinstance(tokens, dict) else dict.fromkeys(tokens, 1))
    states = states_of(batch)
    output, num_sampled, num_rejected = runner.sample(states, batch, grammar)
    ends = [len(requests[name][0]) for name in batch.req_ids]  # of prompts, whose parts draw nothing
    assert num_sampled.tolist() == [int(length >= end) for length, end in zip(batch.seq_lens.tolist(), ends)]
    assert not num_rejected.any()
    check_rows(runner, batch, states, output, requests, outputs, masks)
    return batch, output


BIASED = {"bias", "many_biases", "min_tokens", "everything"}  # their batches are calls
SCENARIOS = {  # kinds; graphs; rows of the buffers that vLLM's own graphs write to; the logits processor
    "calls": (SERVED.keys(), False, 0, SCALED),
    "launches": (SERVED.keys() - BIASED, False, 0, {}),
    "graphs": (SERVED.keys() - BIASED, True, 0, {}),
    "graphs that read few rows in place": (SERVED.keys() - BIASED, True, 4, {}),
    "graphs that read all rows in place": (SERVED.keys() - BIASED, True, SLOTS, SCALED),
}


@pytest.mark.quick(2)
@pytest.mark.parametrize("name", SCENARIOS)
def test_requests_come_and_go(name):
    """Requests of all kinds, alone at first, in slots used again and any order of rows; a batch may stay for some
    steps, over which counts grow. Some rows have a grammar, some batches lie in vLLM's own buffers, and the weight is
    replaced once. Every row gets the token that it gets alone, and no step writes to what an earlier one returned."""
    kinds, graphs, room, processor = SCENARIOS[name]
    runner = runner_of(fakes.Model(V, D, **processor), graphs=graphs)
    step, rng = runner.flashsampling.step, np.random.default_rng(0)
    waiting = {kind: params for kind, params in SERVED.items() if kind in kinds}
    buffers = torch.full((room, D), float("nan")), torch.full((room,), 77)
    if room:
        runner.cudagraph_manager = SimpleNamespace(hidden_states=buffers[0])
        runner.input_buffers = SimpleNamespace(positions=buffers[1])
    running: list[str] = []
    requests, old = {}, []
    outputs: dict[str, list[int]] = {}
    last: list[tuple[torch.Tensor, torch.Tensor]] = []
    for number in range(30):
        if number % 3 == 0:
            for _ in range(2 if len(running) > SLOTS - 3 else 0):
                runner.finish(running.pop(int(rng.integers(len(running)))))
            for kind in map(str, rng.permutation([*waiting])[: 2 if number else 1]):
                prompt = rng.integers(0, V, int(rng.integers(1, 6))).tolist()
                requests[kind], outputs[kind] = (prompt, waiting.pop(kind)), []
                runner.add(**{kind: requests[kind]})
                running.append(kind)
            rng.shuffle(running)
        if number == 20:  # vLLM loads another weight; a graph reads the one that it was recorded with
            old = [] if step.graphs is None else [*step.graphs._steps.values()]
            weight = step.head.layer.weight
            step.head.layer.weight = torch.nn.Parameter(weight.flip(0).clone(), requires_grad=False)
        batch = runner.batch({each: 1 if runner.lengths[each] else len(requests[each][0]) for each in running})
        states = states_of(batch)
        if batch.num_tokens == len(running) <= room and number % 3:
            for buffer, now in zip(buffers, (states, batch.positions)):
                buffer[: len(running)] = now[: len(running)]
            states = buffers[0][: len(running)]
            batch = dataclasses.replace(batch, positions=buffers[1][: len(running)])
        free = [each for each in running if requests[each][1].logprobs is None]
        masks = {each: torch.from_numpy(rng.random(V) < 0.5) for each in free if number % 3 == 2 and rng.random() < 0.3}
        nobody = fakes.GrammarOutput([], np.zeros((0, 11), np.int32)) if number % 2 else None
        grammar = grammar_of([*reversed(masks)], masks) if masks else nobody
        output, num_sampled, num_rejected = runner.sample(states, batch, grammar)
        assert (num_sampled.tolist(), num_rejected.tolist()) == ([1] * len(running), [0] * len(running))
        check_rows(runner, batch, states, output, requests, outputs, masks)
        assert all(torch.equal(now.nan_to_num(), before.nan_to_num()) for now, before in last)
        tensors = [*vars(output).values(), *vars(output.logprobs_tensors or output).values()]
        last = [(each, each.clone()) for each in tensors if is_tensor(each)]
        for each, slot in zip(running, batch.idx_mapping.tolist()):  # as vLLM's ``post_update``, but many tokens
            outputs[each] += (counted := [(number * 37 + 3 * i) % V for i in range(60)])
            runner.sampler.penalties_state.output_bin_counts[slot, counted] += 1
    assert not waiting
    assert not runner.left
    assert counters(SimpleNamespace(model_runner=runner))["fused"] == 30
    if graphs:
        assert step.graphs.replays > 10
        assert old
        assert not {*map(id, old)} & {*map(id, step.graphs._steps.values())}
        mine, theirs = step.graphs.hidden_states.data_ptr(), buffers[0].data_ptr()
        assert {states for *_, states, _ in step.graphs._steps} == {mine, *([theirs] if room else [])}
        assert {kind[0] for kind in step.graphs._steps} <= {1, 2, 4, 8}


@pytest.mark.parametrize("name", SERVED)
def test_a_batch_of_one_kind(name):
    """No batch mate asks for what a kind needs."""
    runner, params = runner_of(), SERVED[name]
    requests = {f"{i}": (PROMPT, dataclasses.replace(params, seed=i)) for i in range(4)}
    runner.add(**requests)
    step_and_check(runner, dict.fromkeys(requests, len(PROMPT)), requests)


@pytest.fixture
def copied(monkeypatch):
    """The arguments of each call of ``read_requests``."""
    read_requests, calls = VllmStep.read_requests, []

    def counted(*args):
        calls.append(args)
        return read_requests(*args)

    monkeypatch.setattr(VllmStep, "read_requests", counted)
    return calls


def test_parameters_are_copied_once_for_a_batch(copied):
    runner, requests = runner_of(), {"a": (PROMPT, SERVED["top_k"]), "b": (PROMPT, SERVED["logprobs"])}
    runner.add(**requests)
    for names, count in (("ab", 1), ("ab", 1), ("ba", 2), ("a", 3)):
        step_and_check(runner, names, requests)
        assert len(copied) == count


def test_parameters_are_copied_again_for_the_next_request_of_a_slot(copied):
    """In a batch that looks the same: the same slots in the same rows."""
    runner, requests = runner_of(), {"a": (PROMPT, SERVED["top_k"]), "b": (PROMPT, SERVED["logprobs"])}
    runner.add(**requests)
    step_and_check(runner, "ba", requests)
    slot = runner.req_states.req_id_to_index["b"]
    for last, name, kind in (("b", "c", "bias"), ("c", "d", "plain")):
        runner.finish(last)
        requests[name] = (PROMPT, SERVED[kind])
        runner.add(**{name: requests[name]})
        assert runner.req_states.req_id_to_index[name] == slot
        step_and_check(runner, (name, "a"), requests)
    assert len(copied) == 3


@pytest.mark.parametrize("graphs", [False, True])
def test_the_next_request_of_a_slot_has_its_own_mask(graphs):
    """Or none. Beside a batch mate with a mask, for then every row's mask is read."""
    runner, requests = runner_of(graphs=graphs), {"mate": (PROMPT, SERVED["allowed"])}
    runner.add(**requests)
    masks = {
        "few": {"allowed_token_ids": [3, 31, 330]},
        "free": {},
        "bad words": {"bad_words_token_ids": [[token] for token in range(300)]},
        "one": {"allowed_token_ids": [4]},
        "free again": {},
    }
    for name, mask in masks.items():
        requests[name] = (PROMPT, SamplingParams(seed=2, temperature=50.0, **mask))
        runner.add(**{name: requests[name]})
        step_and_check(runner, ["mate", name], requests)
        runner.finish(name)
    assert [*masks] in runner.taken.values()


def test_there_are_not_more_graphs_than_some(monkeypatch):
    monkeypatch.setattr("flashsampling.integrations.engine.graphs.MAX_GRAPHS", 2)
    runner = runner_of(graphs=True)
    requests = {name: (PROMPT, SERVED[name]) for name in ("plain", "top_k", "min_p", "repetition")}
    runner.add(**requests)
    for names in 3 * [["min_p"], ["top_k", "min_p", "plain"], ["repetition"]]:
        step_and_check(runner, names, requests)
    assert runner.flashsampling.step.graphs.replays == 4


def test_rows_of_a_wide_mask_lie_as_ever():
    """Kernels are compiled for the stride of a mask, also with one row."""
    runner = runner_of()
    step, words = runner.flashsampling.step, -(-V // 32)
    runner.add(a=(PROMPT, SERVED["plain"]))
    batch = convert_batch(torch.zeros(1, D), runner.batch({"a": 1}), None)
    for rows in (1, 3):
        masks = np.zeros((rows, words + 5), np.int32)
        grammar = Grammar(np.arange(rows), np.arange(rows), masks)
        assert step.read_mask(batch._replace(grammar=grammar, positions=torch.zeros(rows))).stride() == (words, 1)


def test_a_graph_that_cannot_be_recorded(monkeypatch, caplog):
    """The step is launched instead, and the log says so once."""

    def fails(work):
        raise torch.OutOfMemoryError("no room")

    runner = runner_of(graphs=True)
    monkeypatch.setattr(runner.flashsampling.step.graphs, "_record", fails)
    requests = {"a": (PROMPT, SERVED["top_k"])}
    runner.add(**requests)
    for _ in range(3):
        step_and_check(runner, ["a"], requests)
    assert [record.message for record in caplog.records].count(caplog.records[0].message) == 1


def draw_tokens(runner, *names):
    """Returns the tokens of a batch whose rows all have the same hidden states."""
    batch = runner.batch(dict.fromkeys(names, 1))
    states = states_of(batch)
    states[:] = torch.randn(D, generator=torch.Generator().manual_seed(0))
    return runner.sample(states, batch, None)[0].sampled_token_ids[:, 0].tolist()


@pytest.mark.parametrize("reason", LEFT_TO_VLLM)
def test_what_is_left_to_vllm(reason):
    """With its batch mates, but for the token of a seed. In its slot the next request is fused."""
    runner = runner_of(vocab_size=2000) if "1024" in reason else runner_of()
    left, free = (PROMPT, LEFT_TO_VLLM[reason]), (PROMPT, SamplingParams())
    runner.add(a=left, b=free, seeded=(PROMPT, SamplingParams(seed=1)))
    (alone,) = draw_tokens(runner, "seeded")
    assert draw_tokens(runner, "b", "a") == [LEFT, LEFT]
    runner.lengths["seeded"] = 0  # again
    assert draw_tokens(runner, "b", "seeded", "a") == [LEFT, alone, LEFT]
    assert [names for names, _ in runner.left] == [["b", "a"], ["b", "seeded", "a"]]
    seen = runner.flashsampling.counters()
    assert seen == {"fused": 1, "left": 1, "split": 1, "drafts": 0, "reasons": {reason: 2}, "undefined_rows": 0}
    runner.finish("a")
    runner.add(c=free)
    draw_tokens(runner, "c", "b")
    assert runner.flashsampling.counters()["fused"] == 2


@pytest.mark.parametrize("invariant", [False, True])
def test_greedy_tokens_do_not_depend_on_batch_mates(invariant):
    """With ``VLLM_BATCH_INVARIANT``: vLLM's own logits have 16 bits, and often another best token."""
    runner = runner_of()
    runner.flashsampling.step.request_state.rules = VllmRules(V, raw_logprobs=True, invariant=invariant)
    runner.add(a=(PROMPT, SERVED["greedy"]), b=(PROMPT, LEFT_TO_VLLM["min_p with top_p"]))
    alone = draw_tokens(runner, "a")
    assert draw_tokens(runner, "a", "b") == [*(alone if invariant else [LEFT]), LEFT]


def test_vllms_warm_up_is_nobodys_reason():
    """Its requests ask for what is left to vLLM; a user's name has a suffix behind it."""
    runner = runner_of()
    names = ["_warmup_0_", "_warmup_11_", "_warmup_0_-1f2e3d4c"]
    runner.add(**{name: (PROMPT, SamplingParams(min_p=0.1, top_p=0.9)) for name in names})
    for name in names:
        batch = runner.batch({name: 4})
        runner.sample(states_of(batch), batch, None)
    assert [left for left, _ in runner.left] == [[name] for name in names]
    seen = runner.flashsampling.counters()
    assert (seen["left"], seen["reasons"]) == (1, {"min_p with top_p": 1})


def test_other_reasons():
    """Which are not a request's alone."""
    runner = runner_of(logprobs_mode="processed_logprobs")
    runner.add(a=(PROMPT, SamplingParams(logprobs=1)))
    batch = runner.batch({"a": 4})
    runner.sample(states_of(batch), batch, None)
    grammar = runner_of()
    grammar.flashsampling.step.request_state.rules = VllmRules(V, raw_logprobs=True, min_tokens_respects_grammar=True)
    stops = SamplingParams(min_tokens=3, stop_token_ids=[5])
    grammar.add(a=(PROMPT, SamplingParams(logprobs=1)), b=(PROMPT, SamplingParams()), c=(PROMPT, stops))
    for name, words in (("a", 11), ("b", 3), ("c", 11)):  # b's is too narrow
        batch = grammar.batch({"a": 1, "b": 1, "c": 1})
        grammar.sample(states_of(batch), batch, fakes.GrammarOutput([name], np.full((1, words), -1, np.int32)))
    reasons = [list(each.flashsampling.counters()["reasons"]) for each in (runner, grammar)]
    assert reasons == [
        ["a logprobs_mode other than raw_logprobs"],
        ["logprobs with a grammar", "a grammar of another shape", "min_tokens with a grammar"],
    ]


@pytest.mark.parametrize("graphs", [False, True])
def test_a_grammar_for_every_row(graphs):
    """In the order of the rows and in another one, beside requests without masks, which then take no launch of their
    own."""
    runner = runner_of(graphs=graphs)
    names = ["plain", "greedy", "top_k"]
    requests = {name: (PROMPT, SERVED[name]) for name in names}
    runner.add(**requests)
    rng = np.random.default_rng(0)
    for constrained in (names, names[::-1], names, ["greedy", "top_k", "plain"]):
        bits = {name: torch.from_numpy(rng.random(V) < 0.1) for name in names}
        grammar = grammar_of(constrained, bits)
        kept = grammar.grammar_bitmask.copy()
        step_and_check(runner, names, requests, bits, grammar)
        assert np.array_equal(grammar.grammar_bitmask, kept)
    assert runner.flashsampling.step._masks is None


def test_unseeded_requests_have_seeds_of_their_own():
    runner = runner_of()
    runner.add(**{name: (PROMPT, SamplingParams(temperature=50.0)) for name in "abcdefgh"})
    first, second = draw_tokens(runner, *"abcdefgh"), draw_tokens(runner, *"abcdefgh")
    assert len(set(first)) > 5
    assert first != second  # the position is the offset


def test_rows_without_a_score():
    runner = runner_of()
    runner.add(
        a=(PROMPT, SamplingParams(seed=1)),
        b=(PROMPT, SamplingParams(seed=2, allowed_token_ids=[4])),
        c=(PROMPT, SamplingParams()),
    )
    batch = runner.batch({"a": 1, "b": 1, "c": 1})
    states = states_of(batch)
    states[2] = float("nan")
    output, *_ = runner.sample(states, batch, fakes.GrammarOutput(["b"], pack_mask(V, [5], [])[None]))
    assert output.sampled_token_ids[1:, 0].tolist() == [0, 0]
    assert output.sampled_token_ids[0] == expected(runner, states[0], SamplingParams(seed=1)).token_ids
    assert runner.flashsampling.counters()["undefined_rows"] == 2


@pytest.fixture
def calls(monkeypatch):
    """The sampling parameters of every launch or recording of a step."""
    seen = []

    def noted(*args, **rest):
        seen.append((inputs := SampleInputs(*args, **rest)).params)
        return inputs

    monkeypatch.setattr(engine_step, "SampleInputs", noted)
    return seen


def test_warm_up_covers_all_parameters(calls, monkeypatch):
    """Each parameter of a step is of a kind that some call of the warm-up has; with ``test_kernel_variants`` its
    kernels are there."""

    def kinds(params):
        for name in params.names():
            value = getattr(params, name)
            yield name, *((value.dtype, value.ndim) if is_tensor(value) else ())
            if name == "bias_ids":
                yield name, value.shape[1]

    warm: set[object] = set()

    def noted(weight, requests, **whole):
        for request in requests:
            shape = BatchShape(5, len(weight), V, weight.device, 1)
            warm.update(kinds(parse_sampling_params(request, shape)))
        return ["kernel"]

    monkeypatch.setattr(engine_step, "warmup_mixes", noted)
    runner_of()._dummy_sampler_run(torch.randn(5, D))
    calls.clear()
    for names in ["plain"], *zip(SERVED), ["bias", "many_biases"]:
        runner = runner_of()
        runner.add(**{name: (PROMPT, SERVED[name]) for name in names})
        batch = runner.batch(dict.fromkeys(names, 1))
        runner.sample(states_of(batch), batch, None)
    assert {kind for params in calls for kind in kinds(params)} == warm


def test_a_grammar_alone_is_a_mask_alone(calls):
    """A call has what its rows need: the Hopper kernel applies a mask and penalties in the launch that draws."""
    runner = runner_of()
    runner.add(a=(PROMPT, SERVED["plain"]), b=(PROMPT, SERVED["min_tokens"]), c=(PROMPT, SERVED["repetition"]))
    penalties = {"counts", "repetition_penalty", "frequency_penalty", "presence_penalty"}
    batch = runner.batch({"a": 4})
    runner.sample(states_of(batch), batch, fakes.GrammarOutput(["a"], np.full((1, 11), -1, np.int32)))
    for tokens in ({"a": 1}, {"c": 4}, {"a": 1, "c": 1}, {"b": 4}):
        batch = runner.batch(tokens)
        runner.sample(states_of(batch), batch, None)
    biases = {"bias_ids", "bias_values"}
    assert [{*params.names()} for params in calls] == [{"token_mask"}, set(), penalties, penalties, biases]


class Group:
    """One rank that has the whole head."""

    first_token, last_token, vocab_size, num_rows = 0, V, V, 384
    part, skipped_calls = (V, WHOLE), 0

    def check(self, *, collective):
        assert collective

    def raise_if_unusable(self):
        pass

    def __exit__(self, kind, error, trace):
        raise AssertionError(error)


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize(
    ("kinds", "filters"),
    [
        (["plain", "hot", "greedy", "repetition"], set()),
        (["top_k", "plain"], {"top_k"}),
        (["top_k", "penalised_top_k", "min_p"], {"top_k", "min_p"}),
        (["top_k_top_p", "bias"], {"top_k", "top_p"}),
        (["top_p", "greedy_top_k", "logprobs_0"], {"top_p"}),
    ],
)
def test_filters_that_ranks_ask_for(kinds, filters, graphs, calls, monkeypatch):
    """A filter that no drawn row has costs time and changes nothing."""
    monkeypatch.setattr(engine_step, "sample", lambda *_, **__: None)
    monkeypatch.setattr(ops, "sample_sharded", lambda inputs, tp: ops.sample(inputs, ""))
    monkeypatch.setattr(engine_step, "warmup_mixes", lambda *_, **__: ["kernel"])
    runner, params = runner_of(), SERVED | {"greedy_top_k": SamplingParams(temperature=0.0, top_k=3)}
    step, group = runner.flashsampling.step, Group()
    recorded = graphs_of(SLOTS, group) if graphs else None
    step = VllmStep(step.head, step.sampler, step.request_state, step.device, group, graphs=recorded)
    runner.flashsampling.step = step
    runner._dummy_sampler_run(torch.randn(3, D))
    calls.clear()
    requests = {kind: (PROMPT, params[kind]) for kind in kinds}
    runner.add(**requests)
    for _ in range(3):
        step_and_check(runner, kinds, requests)
    assert calls
    for params in calls:
        assert {*FILTERS} & {*params.names()} == filters
    assert not graphs or "bias" in kinds or recorded.replays == 2


def test_parameters_that_cannot_be_read():
    """Those of another vLLM than is known: vLLM draws for that request, and for the slot's next one the step does."""
    runner = runner_of()
    step, state = runner.flashsampling.step, runner.flashsampling.step.request_state
    for params, reason in ((object(), FallbackReason.UNREADABLE), (SamplingParams(seed=1), FallbackReason.SERVED)):
        step.add(2, params, 4)
        assert (state.reasons[2], state.batch_invariant[2]) == (reason, reason == FallbackReason.SERVED)


@pytest.mark.parametrize("vocab_size", [331, 4096, 4097])
def test_counts_by_a_kernel(vocab_size, device):
    """The kernel's counts are those of torch, but for rows without penalties."""
    pytest.importorskip("triton")
    from flashsampling.integrations.vllm.kernels import counts_kernel

    generator = torch.Generator().manual_seed(0)
    words = -(-vocab_size // 32)
    state = SimpleNamespace(
        output_bin_counts=torch.randint(0, 3, (5, vocab_size), dtype=torch.int32, generator=generator),
        prompt_bin_mask=torch.randint(-(2**31), 2**31 - 1, (5, words), dtype=torch.int32, generator=generator),
    )
    slots = torch.tensor([4, 0, 2, 3], dtype=torch.int32)
    penalties = [2.0, 1, 1, 1], [0, 0.5, 0, 0], [0, 0, 1.0, 0]
    rows = default_rows(4, slots.device) | dict(zip(PENALTIES, map(torch.tensor, penalties)))
    step = SimpleNamespace(sampler=SimpleNamespace(penalties_state=state), head=SimpleNamespace(vocab_size=vocab_size))
    wanted, _ = VllmStep.read_counts(step, slots, rows)
    for row, slot in enumerate(slots.tolist()):
        counts = flashsampling.TokenCounts(1, vocab_size)
        bits = state.prompt_bin_mask[slot][:, None] >> torch.arange(32) & 1
        counts.reset(0, bits.flatten()[:vocab_size].nonzero()[:, 0].tolist())
        assert torch.equal(wanted[row], counts.counts[0] + state.output_bin_counts[slot])
    on_device = [
        tensor.to(device)
        for tensor in (state.output_bin_counts, state.prompt_bin_mask, slots, *(rows[name] for name in PENALTIES))
    ]
    out = torch.full((4, vocab_size + 3), 77, dtype=torch.int32, device=device)
    seen = torch.full((4, num_token_groups(vocab_size)), 77, dtype=torch.uint8, device=device)
    of_out = out, out.stride(0), seen, seen.stride(0)
    counts_kernel[(4, -(-vocab_size // 1024))](
        on_device[0], on_device[0].stride(0), on_device[1], words, *on_device[2:], *of_out, vocab_size, BLOCK=1024
    )
    assert torch.equal(out[:3, :vocab_size].cpu(), wanted[:3])
    assert (out[3] == 77).all()  # it has no penalty
    assert (out[:, vocab_size:] == 77).all()
    own = torch.zeros(4, 16 * seen.shape[1], dtype=torch.bool)
    own[:3, :vocab_size] = wanted[:3] != 0
    groups = slice(0, -(-vocab_size // 16))
    assert torch.equal(seen.cpu()[:, groups], own.view(4, -1, 16).any(2)[:, groups].to(torch.uint8))
    assert (seen[:, groups.stop :] == 77).all()
