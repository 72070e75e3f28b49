"""vLLM's drafts in the plug-in, on a model runner that is made up: the tokens of every request are those without
drafts."""

import numpy as np
import pytest
import torch

from flashsampling.integrations.vllm.request_info import pack_mask

from . import fakes
from .fakes import LEFT, SamplingParams
from .test_step import PROMPT, SERVED, SLOTS, D, V, expected, runner_of, states_of

MOST, LONG = 3, 9  # drafts of a request; tokens that are decoded
CONSTRAINED = ("plain", "top_k", "greedy", "repetition", "penalised_top_k")  # by a grammar


def model_of():
    torch.manual_seed(0)
    model = fakes.Model(V, D)
    model.tokens, model.places = torch.randn(V, D), torch.randn(40, D)  # hidden states are of a token and its position
    return model


@pytest.fixture(scope="module")
def model():
    return model_of()


def may(name, position):
    """A grammar's mask."""
    bits = torch.rand(V, generator=torch.Generator().manual_seed(1000 * len(name) + position)) < 0.5
    return pack_mask(V, bits.nonzero()[:, 0].tolist(), [])


def decoded(model, requests, rng, drafter=None, constrained=(), chunk=100, runner=None):
    """LONG tokens of every request, and their log-probabilities. Requests join one by one, in slots used again, in any
    order of rows; prompts come in chunks. ``drafter(name, done)`` drafts what follows so many tokens. ``runner``: of a
    shard."""
    runner = runner or runner_of(model, most_drafts=MOST if drafter else 0)
    waiting, accepted = dict(requests), []
    running: list[str] = []
    texts: dict[str, list[int]] = {name: [] for name in requests}
    logprobs: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = {name: [] for name in requests}
    while waiting or running:
        if waiting and len(running) < SLOTS:
            name = list(waiting)[int(rng.integers(len(waiting)))]
            runner.add(**{name: waiting.pop(name)})
            running.append(name)
        rng.shuffle(running)
        tokens, drafts, fed, masks = {}, {}, [], []
        for name in running:
            prompt, text, start = requests[name][0], texts[name], runner.lengths[name]
            tokens[name] = min(chunk, len(prompt) - start) if start < len(prompt) else 1
            drafts[name] = drafter(name, len(text)) if drafter and start >= len(prompt) else []
            mine = [*((prompt + text)[start : start + tokens[name]]), *drafts[name]]
            fed += [(token, start + i) for i, token in enumerate(mine)]
            if name in constrained:
                masks += [may(name, start + tokens[name] - 1 + i) for i in range(len(drafts[name]) + 1)]
        batch = runner.batch(tokens, drafts, too_many=int(rng.integers(MOST + 1)) if drafter else 0)
        states = torch.stack(
            [model.tokens[token % V] + model.places[position] for token, position in fed] + [model.places[0]] * 3
        )
        names = [name for name in batch.req_ids if name in constrained]
        output, num_sampled, num_rejected = runner.sample(
            states, batch, fakes.GrammarOutput(names, np.stack(masks)) if names else None
        )
        assert output.sampled_token_ids.shape == (len(running), MOST + 1 if batch.num_draft_tokens else 1)
        assert (num_sampled.dtype, num_rejected.dtype) == (torch.int32, torch.int32)
        runner.rejected(batch, num_rejected)
        for row, name in enumerate(batch.req_ids):
            count, slot = int(num_sampled[row]), runner.req_states.req_id_to_index[name]
            drawn = output.sampled_token_ids[row].tolist()
            done = runner.lengths[name] >= len(requests[name][0])
            assert count + int(num_rejected[row]) == (len(drafts[name]) + 1 if done else 0)
            accepted.append((len(drafts[name]), count - 1))
            for i, token in enumerate(drawn[:count]):
                texts[name].append(token)
                runner.sampler.penalties_state.output_bin_counts[slot, token] += 1  # as vLLM's ``post_update``
                if requests[name][1].logprobs is not None:
                    got, n = output.logprobs_tensors, requests[name][1].logprobs + 1
                    bounds = got.cu_num_generated_tokens
                    assert (bounds is None) == (not batch.num_draft_tokens)
                    place = i + (row if bounds is None else bounds[row])
                    logprobs[name].append((got.logprob_token_ids[place, :n], got.logprobs[place, :n]))
            if len(texts[name]) >= LONG:
                runner.finish(name)
                running.remove(name)
    assert not runner.left
    assert (runner.flashsampling.counters()["drafts"] > 0) == (drafter is not None)
    return {name: text[:LONG] for name, text in texts.items()}, logprobs, accepted


def both(model, runner=None):
    """Returns what ``decoded`` gives for every kind of request without drafts, and with drafts: right ones, wrong ones,
    ids that are no tokens, and none. ``runner``: draws with the drafts, on a shard."""
    rng = np.random.default_rng(0)
    requests = {name: (rng.integers(0, V, int(rng.integers(2, 7))).tolist(), params) for name, params in SERVED.items()}
    without = decoded(model, requests, rng, constrained=CONSTRAINED)
    texts, *_ = without

    def drafter(name, done):
        drafts = texts[name][done : done + int(rng.integers(MOST + 1))]
        return [int(rng.choice([rng.integers(V), V + 5])) if rng.random() < 0.25 else token for token in drafts]

    return without, decoded(model, requests, rng, drafter, CONSTRAINED, chunk=3, runner=runner)


def check_both(without, with_drafts):
    (texts, logprobs, _), (mine, theirs, accepted) = without, with_drafts
    for name, text in texts.items():
        assert mine[name] == text, f"{name}: {mine[name]} with drafts, {text} without"
    for name, each in logprobs.items():
        for (ids, values), (wanted_ids, wanted) in zip(theirs[name], each):
            assert ids.tolist() == wanted_ids.tolist(), name
            torch.testing.assert_close(values, wanted, rtol=0, atol=1e-4)
    assert {(most, held) for most in range(MOST + 1) for held in range(most + 1)} <= set(accepted)
    assert texts["min_tokens"].index(120) == 2  # which would come first if it were not forbidden


def test_tokens_are_those_without_drafts(model):
    """In mixed batches."""
    check_both(*both(model))


def test_penalties_and_lengths_matter():
    """Of the drafts before a position."""
    runner, plain = runner_of(most_drafts=MOST), runner_of(most_drafts=MOST)
    plain.model = runner.model
    params = SamplingParams(
        temperature=0.0, presence_penalty=50.0, min_tokens=3, stop_token_ids=[120], logit_bias={120: 80.0}
    )
    runner.add(a=(PROMPT, params))
    runner.batch({"a": 3})
    batch = runner.batch({"a": 1}, {"a": [0, 0, 0]})
    states = states_of(batch)
    states[:] = states[0]
    best = (states[0] @ runner.flashsampling.step.head.weight[:V].T).argsort(descending=True).tolist()
    for drafts, wanted in (([best[0], best[1], best[2]], [*best[:3], 120]), ([best[0], best[0], 1], best[:2])):
        batch.input_ids[1:4] = torch.tensor(drafts)
        output, num_sampled, num_rejected = runner.sample(states, batch, None)
        assert output.sampled_token_ids[0].tolist() == [*wanted, -1, -1][:4]
        assert (num_sampled.tolist(), num_rejected.tolist()) == ([len(wanted)], [4 - len(wanted)])


@pytest.mark.parametrize("least", [1, 2, 6])
@pytest.mark.parametrize("drafted", [0, 1, MOST])
def test_a_stop_token_comes_right_after_min_tokens(least, drafted):
    """Where it is the best token of all, 7 is the second best, and every draft is 7."""
    runner, stop = runner_of(most_drafts=MOST), 120
    text: list[int] = []
    params = SamplingParams(temperature=0.0, min_tokens=least, stop_token_ids=[stop], logit_bias={stop: 80.0, 7: 40.0})
    runner.add(a=(PROMPT, params))
    while len(text) <= least:
        tokens, drafts = (1, [7] * drafted) if text else (len(PROMPT), [])
        batch = runner.batch({"a": tokens}, {"a": drafts}, too_many=len(text))
        output, num_sampled, num_rejected = runner.sample(states_of(batch), batch, None)
        text += output.sampled_token_ids[0, : int(num_sampled)].tolist()
        runner.rejected(batch, num_rejected)
    assert text == [7] * least + [stop]


@pytest.mark.parametrize(
    "drafts", [{}, {"min_p": [11, 11], "fixed": [8, 8, 9], "words": [4], "greedy": [5]}], ids=["no drafts", "drafts"]
)
def test_a_split_batch(drafts):
    """Requests with a seed are drawn here with their drafts and grammars, all others by vLLM; log-probabilities of
    both."""
    runner = runner_of(most_drafts=MOST if drafts else 0)
    requests = {
        "seeded": (PROMPT, SamplingParams(seed=1, logprobs=2)),
        "words": (PROMPT, SamplingParams(bad_words_token_ids=[[3, 4]], logprobs=4)),
        "greedy": (PROMPT, SamplingParams(temperature=0.0)),
        "fixed": (PROMPT, SamplingParams(seed=3, allowed_token_ids=[8, 9])),
        "min_p": (PROMPT, SamplingParams(min_p=0.1, top_p=0.5)),
    }
    runner.add(**requests)
    runner.batch(dict.fromkeys(["min_p", "fixed", "words", "greedy"], 3))
    tokens = {"min_p": 1, "fixed": 1, "seeded": 2, "words": 1, "greedy": 1}  # seeded: a part of its prompt
    batch = runner.batch(tokens, drafts)
    states, bounds = states_of(batch), batch.cu_num_logits_np.tolist()
    rows = dict(zip(tokens, map(slice, bounds, bounds[1:])))
    fixed = [*drafts.get("fixed", []), 8]
    masks = [pack_mask(V, [token], []) for token in (*fixed, *drafts.get("min_p", []), 11)]
    grammars = fakes.GrammarOutput(["fixed", "min_p"], np.stack(masks))
    output, num_sampled, num_rejected = runner.sample(states, batch, grammars)
    assert runner.left == [(list(tokens), grammars)]
    ids = output.sampled_token_ids
    assert ids.shape == (5, MOST + 1 if drafts else 1)
    assert ids[1].tolist() == fixed
    assert ids[[0, 3, 4], 0].tolist() == [LEFT] * 3
    where = int(batch.logits_indices[bounds[2]])
    alone = expected(runner, states[where], requests["seeded"][1], PROMPT, (), int(batch.positions[where]))
    assert ids[2, 0] == alone.token_ids
    assert num_sampled.tolist() == [1, len(fixed), 0, 1, 1]
    assert num_rejected.tolist() == [len(drafts.get("min_p", [])), 0, 0, *([1, 1] if drafts else [0, 0])]
    found = output.logprobs_tensors
    assert found.cu_num_generated_tokens == (bounds if drafts else None)
    assert found.logprobs.shape == (bounds[-1], 5)
    assert (found.logprobs[rows["min_p"]] == -2.0).all()
    assert (found.logprobs[rows["words"]] == -2.0).all()
    assert (found.selected_token_ranks[rows["words"]] == 3).all()
    assert found.logprob_token_ids[rows["fixed"], 0].tolist() == fixed
    assert found.logprob_token_ids[rows["seeded"], 0] == ids[2, 0]
    torch.testing.assert_close(found.logprobs[rows["seeded"], 1:3], alone.top_logprobs, rtol=0, atol=1e-5)
    reasons = {"bad words of several tokens": 1, "min_p with top_p": 1}
    counted = {"drafts": 3 if drafts else 0, "reasons": reasons, "undefined_rows": 0}
    assert runner.flashsampling.counters() == {"fused": 0, "left": 0, "split": 1, **counted}


def test_rows_without_a_score():
    """Token 0, as without drafts, and the last one of the step: a draft of it does not hold. Of a step that fails over
    ranks all rows are such, and ranks whose drafts differ must not have different numbers of tokens."""
    runner = runner_of(most_drafts=MOST)
    runner.add(a=(PROMPT, SamplingParams(seed=1)), b=(PROMPT, SamplingParams(seed=1)))
    runner.batch({"a": 3, "b": 3})
    batch = runner.batch({"a": 1, "b": 1}, {"a": [0, 7], "b": [7]})
    states = states_of(batch)
    states[0] = states[3] = float("nan")
    output, num_sampled, _ = runner.sample(states, batch, None)
    assert num_sampled.tolist() == [1, 1]
    assert output.sampled_token_ids.tolist() == [[0, *[-1] * MOST]] * 2
    assert runner.flashsampling.counters()["undefined_rows"] == 2


def test_warm_up(monkeypatch):
    """The warm-up has as many rows as there are positions, or tokens of a step, and runs the launch after the draw."""
    import flashsampling.integrations.engine.step as module

    rows: set[int] = set()
    behind: list[tuple[int, int, int]] = []

    def noted(weight, requests, max_batch_size, **_):
        rows.add(max_batch_size)
        return ["kernel"]

    monkeypatch.setattr(module, "warmup_mixes", noted)
    monkeypatch.setattr(
        module, "verify_by_match", lambda given, tokens: behind.append((given.n, given.positions, len(tokens)))
    )
    runner = runner_of(most_drafts=MOST)
    runner._dummy_sampler_run(torch.randn(8, D))
    runner.max_num_tokens = 10
    runner._dummy_sampler_run(torch.randn(8, D))
    assert rows == {32, 10}
    assert behind == [(MOST, MOST + 1, MOST + 1)] * 2
