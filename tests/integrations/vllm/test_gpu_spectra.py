"""The plug-in beside vLLM's own sampler on logits as real models make them. As ``test_gpu``, on one GPU, or with
FLASHSAMPLING_VLLM_ON_CPU=1 on a CPU; a process of its own, since it makes an engine for every spectrum.

FLASHSAMPLING_TEST_SPECTRA=FOLDER: its npz files, as ``benchmarks.from_logits --spectra`` takes them, at the vocabulary
of each; without it Zipf's law. A request's hidden states are those of the spectrum's row that its prompt's first token
names, and both samplers' logits the products with one weight, in float32.
"""

import functools
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from . import test_gpu
from .test_gpu import ON_CPU, OPTIONS, RANKS, drawn_often

# that says where vLLM is to run
# isort: split

from scipy import stats

from benchmarks.from_logits import filled, spectrum
from benchmarks.random_models import model_folder
from benchmarks.requests import head_of
from benchmarks.vllm_engine import Engine
from benchmarks.vllm_worker import use_plugin
from flashsampling.integrations.vllm import counters

if RANKS > 1:
    pytest.skip("one rank", allow_module_level=True)
pytestmark = test_gpu.pytestmark
FOLDER = Path(os.environ["FLASHSAMPLING_TEST_SPECTRA"]) if "FLASHSAMPLING_TEST_SPECTRA" in os.environ else None
NAMES = sorted(file.stem for file in FOLDER.glob("*.npz")) if FOLDER else ["Zipf's law"]
D, B = 512, 128
FEW = 4  # rows whose distributions are compared
TIMES = 4 if ON_CPU else 160  # so many draws of each of B requests


@pytest.fixture(scope="module", params=NAMES)
def served(request):
    return served_with(request.param)


@functools.cache  # engines live as long as the process: vLLM's share a pool of graphs, which must not be without any
def served_with(name: str) -> SimpleNamespace:
    """An engine whose requests have these logits; the logits (B, V), float32, and every row's tokens, best first."""
    held = spectrum(FOLDER, name)
    vocab = held[2]
    states, head = head_of(filled(*held, B, vocab, torch.float32, "cpu" if ON_CPU else "cuda"), D)
    engine = Engine(
        model_folder(D, 2, 8, 1024, False, vocab, 2, 64),
        max_model_len=64,
        max_num_seqs=B,
        max_num_batched_tokens=64 * B,  # all prompts in one step
        gpu_memory_utilization=0.25,
        enable_prefix_caching=False,
        logprobs_mode="raw_logprobs",
        **OPTIONS,
    )
    worker = engine.llm.llm_engine.engine_core.engine_core.model_executor.driver_worker
    weight = worker.model_runner.model.lm_head.weight
    states, head = states.to(weight.dtype), head.to(weight.dtype)
    with torch.inference_mode():
        weight.data[:vocab].copy_(head)
    wide = head.float()
    logits = states.float() @ wide.T
    return SimpleNamespace(
        engine=engine, runner=worker.model_runner, vocab=vocab, states=states, wide=wide, logits=logits,
        best=logits.argsort(-1, descending=True),
    )  # fmt: skip


@pytest.fixture
def rows(served, monkeypatch):
    """Both samplers see these logits and nothing of the model. Which rows of them a step had."""
    runner, seen = served.runner, []
    served.engine.tell(use_plugin, True)
    plugin: Any = type(runner)
    theirs: Any = plugin.__mro__[2]

    def placed(original):
        def sample(self, hidden_states, input_batch, grammar_output):
            firsts = self.req_states.all_token_ids.gpu[input_batch.idx_mapping, 0].long()
            seen.append(firsts)
            hidden_states = hidden_states.clone()
            hidden_states[input_batch.logits_indices] = served.states[firsts]
            return original(self, hidden_states, input_batch, grammar_output)

        return sample

    monkeypatch.setattr(runner.model, "compute_logits", lambda states: states.float() @ served.wide.T)
    monkeypatch.setattr(plugin, "sample", placed(plugin.sample))
    monkeypatch.setattr(theirs, "sample", placed(theirs.sample))
    return seen


def params_of(served, **more):
    return served.engine.params(**{"max_tokens": 1, "ignore_eos": True, "detokenize": False, **more})


def prompts_of(served, rows):
    """Returns requests' prompts: the row, then the first rows' three best tokens, to which penalties apply."""
    best = served.best[sorted(set(rows))[:FEW], :3].flatten().tolist()
    return [[row, *best] for row in rows]


def kinds_of(best: torch.Tensor) -> dict[str, dict[str, Any]]:
    """Returns parameters, the same for all rows, about tokens that are likely in some of them."""
    bans = {token for row in best[:, 1:10:2].tolist() for token in row}
    biased = {
        token: 2.0 * (-1) ** (place + 1) for place, token in enumerate(best[:, [0, 5, 50, 500]].flatten().tolist())
    }
    allowed = sorted(set(best[:, :500:2].flatten().tolist()))  # vLLM takes 1024 at most
    return {
        "plain": {},
        "cold": {"temperature": 0.6},
        "hot": {"temperature": 1.5},
        "top_k": {"top_k": 50},
        "top_p": {"top_p": 0.95},
        "top_p cold": {"top_p": 0.9, "temperature": 0.6},
        "top_k top_p": {"top_k": 200, "top_p": 0.9},
        "top_k of many": {"top_k": 1500},
        "min_p": {"min_p": 0.05},
        "min_p hot": {"min_p": 0.01, "temperature": 1.5},
        "penalties": {"repetition_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": 0.5},
        "bias": {"logit_bias": biased},
        "allowed": {"allowed_token_ids": allowed},
        "bad_words": {"_bad_words_token_ids": [[token] for token in sorted(bans)]},
        "everything": {
            "temperature": 1.3, "top_k": 800, "min_p": 0.002, "repetition_penalty": 1.3, "logit_bias": biased,
            "allowed_token_ids": allowed, "_bad_words_token_ids": [[token] for token in sorted(bans)], "logprobs": 5,
        },
    }  # fmt: skip


KINDS = list(kinds_of(torch.arange(FEW * 1000).view(FEW, 1000)))


@pytest.mark.parametrize("kind", KINDS)
def test_the_distribution_is_vllms(served, rows, kind):
    """Two-sample chi-square of each of some rows, over 5120 draws of either sampler; one in 10**6 would fail by chance.
    What is drawn seldom is counted by how far down in its row it is."""
    few = torch.linspace(0, B - 1, FEW).long().tolist()
    params = params_of(served, **kinds_of(served.best[few].cpu())[kind])
    prompts, before = prompts_of(served, few * (B // FEW)), served.engine.tell(counters)
    found = []
    for plugin in (True, False):
        rows.clear()
        drawn = torch.stack(drawn_often(served.engine, served.runner, plugin, prompts, params, TIMES))
        assert drawn.shape == (TIMES, B)
        assert all(torch.equal(each, rows[0]) for each in rows)
        found.append([drawn[:, rows[0] == row].flatten() for row in few])
    after = served.engine.tell(counters)
    assert after["left"] == before["left"]
    assert after["fused"] >= before["fused"] + TIMES
    compared = 0
    for row, mine, theirs in zip(few, *found):
        assert len(mine) == len(theirs) == TIMES * B // FEW
        place = served.best[row].argsort()  # of a token, where in the row's order it is
        table = by_place(
            np.stack([place[each].bincount(minlength=served.vocab).cpu().numpy() for each in (mine, theirs)])
        )
        if table.shape[1] > 1:  # else the row is so sure that next to nothing but one token is drawn
            compared += 1
            p = stats.chi2_contingency(table).pvalue
            print(f"{kind}, row {row}: {table.shape[1]} cells of {table.sum()} draws, p = {p:.3g}")
            assert p > 1e-6
    assert compared > 0


def by_place(counts: np.ndarray) -> np.ndarray:
    """(2, n) counts by place in a row: places that are drawn seldom are put together with what is behind them."""
    edges, held = [0], 0
    for place, both in enumerate(counts.sum(0).tolist(), 1):
        held += both
        if held >= 20:
            edges.append(place)
            held = 0
    return np.add.reduceat(counts, edges[:-1] if len(edges) > 1 else edges, axis=1)


def test_log_probabilities_are_vllms(served, rows):
    """The 20 best tokens of all rows and the drawn one have vLLM's log-probabilities, and those in float64; ranks too,
    unless two logits are as close as two sums of one row can be."""
    exact = served.logits.double().log_softmax(-1)
    for asked in ({"temperature": 0.0}, {"temperature": 1.5}):
        found = []
        for plugin in (True, False):
            served.engine.tell(use_plugin, plugin)
            outputs = served.engine.generate(
                prompts_of(served, range(B)), [params_of(served, logprobs=20, **asked)] * B
            )
            found.append([(output.token_ids[0], output.logprobs[0]) for output in outputs])
            for row, (drawn, entries) in enumerate(found[-1]):
                assert drawn in entries
                for token, entry in entries.items():
                    value = exact[row, token]
                    assert abs(entry.logprob - float(value)) <= 1e-3
                    nearest = [int((exact[row] > value + margin).sum()) + 1 for margin in (1e-4, -1e-4)]
                    assert nearest[0] <= entry.rank <= nearest[1]
        for (_, mine), (_, theirs) in zip(*found):
            assert len(mine.keys() & theirs.keys()) >= 19
            for token in mine.keys() & theirs.keys():
                assert abs(mine[token].logprob - theirs[token].logprob) <= 1e-3
    assert rows
