"""Everything that a request may ask for, mixed at random: the oracle against section 5 of the contract written out
token by token, the other implementations against the oracle. ``tests/mixes.py`` makes the problems."""

import math

import pytest
import torch

from flashsampling import ops
from flashsampling.inputs import SampleInputs
from flashsampling.noise import Stream
from flashsampling.outputs import SampleResult
from flashsampling.reference import logit_transforms, oracle, streaming
from flashsampling.sampling_params import DEFAULT_PARAMS, SamplingParams
from tests.api.test_sampling import Largest
from tests.conftest import DEVICE
from tests.mixes import FIELDS, INF, Mix, word_by_word
from tests.problems import assert_same_rows, parts_of

TORCH = ("reference", "streaming")  # implementations that do all of it


def differences(ours: SampleResult, theirs: SampleResult, step: SampleInputs, tolerance: float = 0.0) -> list[str]:
    """Names of parts that are not the same: ids exactly, values but for ``tolerance``, relative and absolute."""
    assert (ours.values is None) == (theirs.values is None)
    ours_, theirs_ = parts_of(ours, step), parts_of(theirs, step)
    return [
        name
        for name, part in ours_.items()
        if not torch.allclose(part, theirs_[name], rtol=tolerance, atol=tolerance, equal_nan=True)
    ]


@pytest.mark.quick(1)
@pytest.mark.parametrize("wanted", [1500, pytest.param(10_000, marks=pytest.mark.slow)])
def test_the_oracle_is_the_contract_word_by_word(wanted):
    rows, params, undefined, drawn = 0, set(), 0, 0
    for seed in range(10**6):
        step = Mix(seed).make()
        ours = ops.sample(step, "reference")
        assert not differences(ours, word_by_word(step), step, 1e-5), seed
        tokens = parts_of(ours, step)["token_ids"]
        rows, undefined, drawn = rows + len(tokens), undefined + int((tokens < 0).sum()), drawn + tokens.numel()
        params |= set(step.params.names())
        if rows >= wanted:
            break
    assert params == FIELDS
    assert 0.05 < undefined / drawn < 0.4  # both kinds of row are there


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("head", "wanted"),
    [
        (False, 1000),
        (True, 1000),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((False, 7000), (True, 3000))),
    ],
)
def test_streaming_is_the_oracle(head, wanted, monkeypatch):
    """Bit for bit, in groups of rows and of draws however small: both make the same sums, if a GPU not always in one
    order."""
    rows = 0
    for seed in range(10**6):
        mix = Mix(seed + 10**7, device=DEVICE)
        step = mix.make()
        step = mix.of_a_head(step) if head else step
        monkeypatch.setattr(streaming, "_LOGITS_AT_ONCE", {DEVICE.type: mix.random.choice((1, 100, 10**6))})
        monkeypatch.setattr(streaming, "_SCORES_AT_ONCE", {DEVICE.type: mix.random.choice((1, 300, 10**6))})
        ours, theirs = ops.sample(step, "streaming"), ops.sample(step, "reference")
        assert not differences(ours, theirs, step, 1e-6 if DEVICE.type == "cuda" else 0.0), seed
        rows += len(step.hidden_states)
        if rows >= wanted:
            break


@pytest.mark.quick(2)
@pytest.mark.parametrize("impl", TORCH)
@pytest.mark.parametrize("part", range(3))
def test_a_row_depends_on_itself_alone(part, impl):
    """Not on B, its place, or its mates: alone, at another place of another batch, it gets the same of everything."""
    for seed in range(part, 60, 3):
        mix = Mix(seed + 2 * 10**7)
        step = mix.make(batch=6)
        whole = ops.sample(step, impl)
        for first, last in ((0, 1), (3, 4), (2, 6)):
            some = step.part(first, last)._replace(weight=step.hidden_states[first:last])
            assert_same_rows(ops.sample(some, impl), some, whole, step, slice(first, last))


@pytest.mark.quick(2)
@pytest.mark.parametrize("impl", TORCH)
@pytest.mark.parametrize("part", range(3))
def test_fused_and_from_logits_are_the_same(part, impl):
    for seed in range(part, 100, 3):
        mix = Mix(seed + 3 * 10**7)
        step = mix.of_a_head(mix.make())
        logits = step.hidden_states @ step.weight.T
        unfused = step._replace(hidden_states=logits, weight=logits, logits=logits)
        assert not differences(ops.sample(step, impl), ops.sample(unfused, impl), step), seed


@pytest.mark.quick(2)
@pytest.mark.parametrize("impl", TORCH)
@pytest.mark.parametrize("part", range(3))
def test_a_filter_that_keeps_the_winner_does_not_change_it(part, impl):
    kept_it = 0
    for seed in range(part, 100, 3):
        step = Mix(seed, poisoned=False).make(vocab=64)
        step = step._replace(
            params=step.params._replace(logprobs=False, top_logprobs=0, logprob_ids=None, logsumexp=False)
        )
        unfiltered = step._replace(params=step.params._replace(**DEFAULT_PARAMS.filter_values()))
        logits = oracle.transform_logits(oracle.head_logits(step), step.rows().temperature, step.params)
        free, filtered = (parts_of(ops.sample(one, impl), one)["token_ids"] for one in (unfiltered, step))
        assert torch.equal(free < 0, filtered < 0)
        if logits.kept is None:
            assert torch.equal(free, filtered)
            continue
        stays = logits.kept.gather(1, free.clamp(min=0)) & (free >= 0)
        assert torch.equal(filtered[stays], free[stays])
        assert logits.kept.gather(1, filtered.clamp(min=0))[filtered >= 0].all()
        assert (filtered != free)[~stays & (free >= 0)].all()
        kept_it += int(stays.sum())
    assert kept_it > 16


@pytest.mark.parametrize("impl", TORCH)
def test_streams_have_noise_of_their_own_with_filters_too(impl):
    logits = torch.zeros(64, 500)
    step = SampleInputs(logits, logits, 1.0, torch.arange(64), 0, 1, 500, logits=logits)
    drawn = [ops.sample(step._replace(params=SamplingParams(stream=stream, top_k=400)), impl).ids for stream in Stream]
    assert (drawn[0] == drawn[1]).float().mean() < 0.1


# -- single parameters, where they end


def kept(logits, temperature=1.0, **filters_of):
    logits = torch.as_tensor(logits)[None]
    return logit_transforms.kept(logits, torch.tensor([temperature]), **filters_of)[0].nonzero().flatten().tolist()


def test_top_p_keeps_the_shortest_prefix_that_reaches_p():
    logits = torch.tensor([0.5, 0.25, 0.125, 0.125]).log()
    below, above = (math.nextafter(0.5, to) for to in (0, 1))
    for p, wanted in (
        (0.0, [0]), (-3.0, [0]), (1e-45, [0]), (below, [0]), (0.5, [0]), (above, [0]), (0.5 + 1e-7, [0, 1]),
        (0.75, [0, 1]), (0.76, [0, 1, 2]), (0.875, [0, 1, 2]), (0.88, [0, 1, 2, 3]), (1.0, [0, 1, 2, 3]),
        (7.0, [0, 1, 2, 3]),
    ):  # fmt: skip
        assert kept(logits, top_p=torch.tensor([p])) == wanted, p
    assert kept([3.0] * 8, top_p=0.5) == [0, 1, 2, 3]  # flat: the lowest ids
    assert kept([0.0, -INF, 0.0], top_p=0.999) == [0, 2]
    assert kept([0.0, -200.0, -INF], top_p=1.0) == [0, 1, 2]  # off is off, however improbable
    assert kept([0.0, -50.0], top_p=1 - 2**-24) == [0]


def test_top_p_is_of_what_top_k_kept_and_min_p_relative_to_its_best():
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    assert kept(logits, top_p=0.6) == [0, 1]
    assert kept(logits, top_k=2, top_p=0.56) == [0]  # 0.4 of 0.7 is 0.571
    assert kept(logits, top_k=2, top_p=0.58) == [0, 1]
    assert kept(logits, top_k=2, top_p=0.56, joint_top_p=1) == [0, 1]  # 0.4 and 0.3 of 1
    assert kept(logits, top_k=2, top_p=0.71, joint_top_p=1) == [0, 1]  # the nucleus has three
    assert kept(logits, top_k=2, top_p=0.39, joint_top_p=torch.tensor([1], dtype=torch.int32)) == [0]
    assert kept(logits, top_k=2, top_p=0.56, joint_top_p=torch.tensor([0], dtype=torch.int32)) == [0]
    assert kept(logits, top_k=2, top_p=0.56, joint_top_p=torch.tensor([-1], dtype=torch.int32)) == [0, 1]
    assert kept(logits, top_k=3, top_p=0.95, min_p=0.6, joint_top_p=1) == [0, 1]
    assert kept(logits, min_p=0.49) == [0, 1, 2]
    assert kept(logits, min_p=0.51) == [0, 1]
    assert kept(logits, min_p=0.76) == [0]
    assert kept(logits, temperature=2.0, min_p=0.6) == [0, 1, 2]  # of the probabilities that are drawn from: 0.5 ** 0.5
    assert kept(logits, temperature=0.0, min_p=0.6) == [0, 1]  # a greedy row's at temperature 1
    assert kept([2.0, 1.0, 2.0], min_p=1.0) == [0, 2]
    assert kept([2.0, 1.0, 2.0], min_p=torch.tensor([1.5])) == [0]  # the first one always
    for off in (0.0, -1.0):
        assert kept([0.0, -1000.0], min_p=torch.tensor([off])) == [0, 1]
    assert kept(logits, temperature=INF, top_p=0.5) == [0, 1]  # uniform, and ordered by logit


def test_streaming_holds_few_rows_whatever_the_batch():
    """Of a request's logits too, in each of its steps."""
    largest = {}
    params = SamplingParams(top_k=5, top_p=0.9, min_p=0.1, logprobs=True, top_logprobs=5, soft_cap=3.0)
    for batch in (8, 64):
        step = SampleInputs(
            torch.randn(batch, 4), torch.randn(5000, 4), 1.0, torch.arange(batch), 0, 9, 5000, params=params
        )
        with pytest.MonkeyPatch.context() as patched, Largest() as watch:
            patched.setattr(streaming, "_LOGITS_AT_ONCE", {"cpu": 4 * 5000})
            patched.setattr(streaming, "_SCORES_AT_ONCE", {"cpu": 4 * 5000})
            streaming.run(step)
        largest[batch] = max(watch.elements.values())
    assert largest[8] == largest[64] < 8 * 5000 * 4  # Philox words of one draw: of four rows, padded to whole groups
