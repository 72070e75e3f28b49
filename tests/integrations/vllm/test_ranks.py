"""The plug-in on two and three ranks that share an LM head as vLLM shards it, over gloo: what one rank that has all of
it draws, and ranks of which one does something else. Three processes, once."""

import contextlib
import dataclasses
import functools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import flashsampling.integrations.vllm.runner as plugin
from flashsampling import ops
from flashsampling.integrations.engine.head import Layers
from flashsampling.integrations.engine.request_info import RequestState
from flashsampling.integrations.vllm import Refused, counters
from flashsampling.integrations.vllm.head import find_head
from flashsampling.integrations.vllm.request_info import VllmRules, pack_mask
from flashsampling.integrations.vllm.runner import VllmSampler, open_group
from flashsampling.integrations.vllm.settings import PLUGIN
from flashsampling.integrations.vllm.step import VllmStep
from flashsampling.outputs import SampleResult
from flashsampling.tensor_parallel import TensorParallel, TensorParallelMismatch, capabilities

from . import fakes
from .fakes import LEFT, GrammarOutput, SamplingParams
from .test_drafts import MOST, both, check_both, model_of
from .test_step import PROMPT, SERVED, VLLM, D, V, Whole, graphs_of, states_of

RANKS = 3
REQUESTS = {name: (PROMPT, params) for name, params in SERVED.items()} | {
    "unseeded": (PROMPT, SamplingParams(temperature=2.0)),
    "other_top_k": (PROMPT, SamplingParams(seed=20, top_k=5, top_p=0.9, temperature=4.0)),
}
LEFT_TO_VLLM = {"words": (PROMPT, SamplingParams(bad_words_token_ids=[[3, 4]], logprobs=4))}
SLOTS = len(REQUESTS) + len(LEFT_TO_VLLM)
HEADS = {"plain": {}, "changed": {"bias": True, "scale": 0.5, "soft_cap": 4.0}}
SHARDS = {  # ranks, rows of each, and the head: vLLM pads the vocabulary so that every rank has as many
    "two": (2, 192, "plain"),
    "three": (3, 112, "changed"),  # no word of a mask ends where the second shard does
    "one of three has nothing": (3, 192, "plain"),
    "graphs": (2, 192, "plain"),
}


class Gathering(fakes.Processor):
    """vLLM's logits processor with tensor parallelism."""

    group: dist.ProcessGroup | None

    def logits_gemm(self, lm_head, hidden_states, bias):
        mine = super().logits_gemm(lm_head, hidden_states, bias)
        parts = [torch.empty_like(mine) for _ in range(lm_head.tp_size)]
        dist.all_gather(parts, mine, group=self.group)
        return torch.cat(parts, dim=-1)


def runner_of(head="plain", ranks=1, rows=V, group=None, most_drafts=0, graphs=False):
    """Returns a runner of this rank's shard, or of the whole head; with graphs, as if gloo could be recorded."""
    torch.manual_seed(0)
    np.random.seed(0)  # noqa: NPY002 # as vLLM does on every rank: seeds of requests that have none come from there
    model, tp, kind = fakes.Model(V, D, **HEADS[head]), None, fakes.Processor
    if group is not None:
        rank, kind = dist.get_rank(group), Gathering
        layer, whole = model.lm_head, model.logits_processor
        for name, parameter in list(layer.named_parameters()):
            padded = torch.cat((parameter, torch.zeros(rows * ranks, *parameter.shape[1:])))
            setattr(layer, name, torch.nn.Parameter(padded[rank * rows :][:rows].clone(), requires_grad=False))
        layer.tp_size = ranks
        layer.shard_indices.padded_org_vocab_start_index = rank * rows
        layer.shard_indices.org_vocab_end_index = min((rank + 1) * rows, V)
        model.logits_processor = Gathering(V, whole.scale, whole.soft_cap)
        model.logits_processor.group = group
    made = find_head(model, D, torch.float32, torch.device("cpu"), Layers(kind, fakes.Embedding, fakes.Unquantized))
    if group is not None:
        assert (made.first_token, made.ranks) == (rank * rows, ranks)
        tp = open_group(made, group, SLOTS * (most_drafts + 1))
    sampler = fakes.Sampler(SLOTS, V)
    runner = Whole(model, sampler, [*range(1, SLOTS), 0])
    runner.num_speculative_steps = most_drafts
    slots, recorded = RequestState(SLOTS, VllmRules(V, raw_logprobs=True)), graphs_of(SLOTS, tp) if graphs else None
    step = VllmStep(made, sampler, slots, torch.device("cpu"), tp, most_drafts, recorded)
    runner.flashsampling = VllmSampler(step, VLLM)
    return runner


def step_of(runner, tokens, grammar=None, spoiled=()):
    """Tokens and log-probabilities of a step with so many tokens of each request, which are counted."""
    batch = runner.batch(tokens)
    states = states_of(batch)
    states[batch.logits_indices[list(spoiled)].long()] = float("nan")
    output, *_ = runner.sample(states, batch, grammar)
    ids, found = output.sampled_token_ids[:, 0], output.logprobs_tensors
    runner.sampler.penalties_state.output_bin_counts[batch.idx_mapping.long(), ids] += 1
    if found is None:
        return ids.tolist(), None
    return ids.tolist(), [
        part.tolist() for part in (found.logprob_token_ids, found.logprobs, found.selected_token_ranks)
    ]


def steps_of(runner, alone):
    """Returns steps of all kinds, each alone if ``alone``, and of mixes that make other calls."""
    runner.add(**REQUESTS, **LEFT_TO_VLLM)
    names = list(REQUESTS)
    free = [name for name in names if REQUESTS[name][1].logprobs is None]
    masks = np.stack([pack_mask(V, range(i % 3 + 3, V, 1 + i % 7), []) for i in range(len(free))])
    steps = [step_of(runner, dict.fromkeys(names, 4))]
    for chosen in (
        [names[::-1]],
        [[name] for name in names if alone],
        [
            ["plain", "greedy", "hot", "unseeded"],
            ["top_k", "other_top_k", "greedy"],
            ["top_k", "top_p"],
            ["min_p", "top_k"],
        ],
        [["logprobs_0", "repetition"], ["allowed", "frequency"], ["many_biases", "logprobs"], ["bias", "plain"]],
        3 * [["plain", "hot", "greedy"]] + 3 * [["top_k", "top_p", "frequency"]] + 3 * [["logprobs_0", "repetition"]],
    ):
        steps += [step_of(runner, dict.fromkeys(each, 1)) for each in chosen]
    for each in (["plain"], ["greedy", "frequency"], free):
        steps.append(step_of(runner, dict.fromkeys(each, 1), GrammarOutput(each[::-1], masks[: len(each)])))
    steps.append(step_of(runner, {"plain": 1, "top_p": 1, "hot": 1}, spoiled=[1]))
    steps.append(step_of(runner, {"plain": 1, "hot": 1}, spoiled=[0]))
    split = {"logprobs": 1, "words": 4, "unseeded": 1, "plain": 1}
    steps.append(step_of(runner, split, GrammarOutput(["plain", "words"], masks[:2])))
    return steps, runner.flashsampling.counters()


# -- ranks of which one does something else


ASKED = SamplingParams(
    seed=1, top_p=0.5, logprobs=0, presence_penalty=0.5, logit_bias={3: 1.0}, allowed_token_ids=[*range(99)]
)
DIFFERENT = {  # what rank 1's request has instead, and what the error says
    "no logprobs": ({"logprobs": None}, ["return_logprobs", "top_logprobs"]),
    "seed": ({"seed": None}, ["seed"]),
}


def failures(runner, params, grammar=None):
    """Returns what every later step raises, and what shutting down raises."""
    runner.add(a=(PROMPT, params))
    said = []
    for grammars in (grammar, None):
        with pytest.raises(TensorParallelMismatch) as raised:
            step_of(runner, {"a": 1}, grammars)
        said.append((raised.value.rank, sorted(raised.value.failure.differs)))
    runner.shutdown()
    return said


def different_ranks(rank):
    said = {}
    for name, (change, _) in DIFFERENT.items():
        params = dataclasses.replace(ASKED, **change if rank == 1 else {})
        said[name] = failures(runner_of("plain", RANKS, 112, dist.group.WORLD), params)
    mask = GrammarOutput(["a"], np.full((1, 11), 7, np.int32))
    runner = runner_of("plain", RANKS, 112, dist.group.WORLD)
    said["grammar"] = failures(runner, SamplingParams(seed=1), mask if rank == 1 else None)
    return said


def warm_up_that_fails(rank, chosen):
    """On rank 1, in the middle: all ranks say so, and go vLLM's way if they may."""
    group, calls, real = dist.new_group(), [], ops.sample_sharded  # whose connections a time-out closes

    def fails(*args, **named):
        calls.append(1)
        if rank == 1 and len(calls) == 3:
            raise MemoryError("no room")
        return real(*args, **named)

    with pytest.MonkeyPatch.context() as patch:
        # as long do others wait
        patch.setattr(plugin, "TensorParallel", functools.partial(TensorParallel, timeout=3.0))
        patch.setattr(ops, "sample_sharded", fails)
        runner = runner_of("plain", RANKS, 112, group)
        patch.setenv("FLASHSAMPLING_VLLM", chosen)
        with pytest.raises(Refused, match="no room") if chosen == "require" else contextlib.nullcontext():
            runner._dummy_sampler_run(torch.zeros(4, D))
    assert len(calls) >= 3
    assert type(runner) is fakes.Runner
    assert "no room" in counters(SimpleNamespace(model_runner=runner))["refused"]


def different_drafts_in_the_last_step(rank, group):
    """Over a transport whose steps cannot raise themselves. Tokens of the step are 0, which a draft is on one rank; as
    many on both, and who waits for them is told, for there is no next step."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(capabilities, "why_no_nccl", lambda members: None)  # gloo stands in for it
        runner = runner_of("plain", 2, 192, group, MOST)
    assert runner.flashsampling.step.tp.transport == "nccl"
    runner.add(a=(PROMPT, SamplingParams(seed=1)), b=(PROMPT, SamplingParams(seed=2)))
    first = runner.batch({"a": 3, "b": 3})
    runner.execute_model_state = states_of(first), first
    assert len(runner.sample_tokens(None).get_output()) == 2
    batch = runner.batch({"a": 1, "b": 1}, {"b": [5 if rank == 1 else 0, 0]})
    runner.execute_model_state = states_of(batch), batch
    output = runner.sample_tokens(None)
    with pytest.raises(TensorParallelMismatch) as raised:
        output.get_output()
    runner.execute_model_state = None
    assert runner.sample_tokens(None) is None
    said = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PLUGIN.logger, "error", lambda *words: said.append(str(words[-1])))
        runner.shutdown()
    return raised.value.failure.differs, type(output).get_output(output), len(said)


def recording_that_fails(rank, group):
    """On one rank, in the middle of a step: nobody takes it for a step, and that rank launches what others replay."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(capabilities, "why_no_nccl", lambda members: None)  # gloo stands in for it
        runner = runner_of("plain", 2, 192, group, graphs=True)
    tp, graphs = runner.flashsampling.step.tp, runner.flashsampling.step.graphs
    assert tp.transport == "nccl"

    def fails(*_):
        raise torch.OutOfMemoryError("no room")

    def record(work, record=graphs._record):
        if rank == 0:
            ids = torch.full((1,), -7)

            def replay():
                graphs.replays += 1
                ids.copy_(work().ids)

            return replay, SampleResult(ids)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tp._transport, "_capturing", lambda: True)
            patch.setattr(ops, "_run_and_exchange", fails)
            work()

    graphs._record = record
    runner.add(a=(PROMPT, SERVED["top_k"]))
    drawn = [step_of(runner, {"a": 1}) for _ in range(4)]
    tp.raise_if_failed()
    assert (graphs.replays, tp.skipped_calls) == (3 if rank == 0 else 0, 0)
    runner.shutdown()
    return repr(drawn)


def with_drafts(group):
    """Returns what ``both`` gives."""
    runner = runner_of("plain", 2, 192, group, MOST)
    runner._dummy_sampler_run(torch.zeros(4, D))
    found = both(model_of(), runner)
    runner.shutdown()
    return found


def rank_main(rank, folder, queue):
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    pair = dist.new_group([0, 1])
    torch.set_num_threads(1)
    results = {}
    for shards, (ranks, rows, head) in SHARDS.items():
        if rank < ranks:
            runner = runner_of(head, ranks, rows, pair if ranks == 2 else dist.group.WORLD, graphs=shards == "graphs")
            runner._dummy_sampler_run(torch.zeros(4, D))
            results[shards] = steps_of(runner, shards == "two")
            runner.shutdown()
            assert runner.flashsampling.step.tp._closed
            assert shards != "graphs" or runner.flashsampling.step.graphs.replays > 3
    if rank < 2:
        found = with_drafts(pair)
        check_both(*found)
        results["drafts"] = repr(found[1])
        results["last step"] = different_drafts_in_the_last_step(rank, pair)
        results["recording"] = recording_that_fails(rank, pair)
    for chosen in ("require", "auto"):
        warm_up_that_fails(rank, chosen)
    results["different"] = different_ranks(rank)
    assert not ops.open_groups
    queue.put((rank, results))
    dist.destroy_process_group()


def test_ranks(tmp_path):
    context = mp.get_context("spawn")
    queue = context.SimpleQueue()
    ranks = mp.spawn(rank_main, args=(tmp_path, queue), nprocs=RANKS, join=False)
    assert ranks is not None
    wanted = {shards: steps_of(runner_of(head), shards == "two") for shards, (_, _, head) in SHARDS.items()}
    results: dict[int, Any] = {}
    while not ranks.join(timeout=1):
        while not queue.empty():
            results.update([queue.get()])
    while not queue.empty():
        results.update([queue.get()])
    assert len(results) == RANKS
    for shards, (count, _, _) in SHARDS.items():
        steps, counters = wanted[shards]
        first, *others = (results[rank][shards] for rank in range(count))
        assert repr(first[0]) == repr(others[0][0]) == repr(others[-1][0])  # every bit
        check_steps(first[0], steps)
        assert all(got[1] == counters for got in (first, *others))
    assert counters["fused"] == len(steps) - 1
    # one of three rows without a score is one that two masks leave nothing
    assert (counters["split"], counters["left"], counters["undefined_rows"]) == (1, 0, 3)
    assert steps[-1][0][1] == LEFT
    for name, (_, said) in DIFFERENT.items():
        assert all(results[rank]["different"][name] == [(1, said)] * 2 for rank in range(RANKS)), name
    assert all(each["different"]["grammar"][0][0] == 1 for each in results.values())
    assert results[0]["drafts"] == results[1]["drafts"]  # every bit that is printed
    assert results[0]["recording"] == results[1]["recording"]
    assert results[0]["last step"] == results[1]["last step"] == (("draft_token_ids",), [[0], [0]], 1)


def check_steps(steps, wanted):
    """Tokens, and log-probabilities to what sums of shards round otherwise."""
    for number, ((ids, logprobs), (their_ids, their_logprobs)) in enumerate(zip(steps, wanted, strict=True)):
        assert ids == their_ids, number
        assert (logprobs is None) == (their_logprobs is None)
        if logprobs is not None:
            assert (logprobs[0], logprobs[2]) == (their_logprobs[0], their_logprobs[2]), number
            np.testing.assert_allclose(logprobs[1], their_logprobs[1], rtol=0, atol=2e-5)
