"""What a step is, and who does it: the table of implementations, and one more of them."""

import dataclasses
import importlib.metadata
import importlib.util
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import flashsampling
from flashsampling import exchange_protocol, ops
from flashsampling.backends import BACKENDS, Backend, Package
from flashsampling.exchange_protocol import Shard
from flashsampling.inputs import SampleInputs
from flashsampling.noise import Stream
from flashsampling.outputs import SampleResult
from flashsampling.reference import streaming
from flashsampling.sampling_params import DEFAULT_PARAMS, SamplingParams
from flashsampling.tensor_parallel import TensorParallel
from tests.problems import assert_agreement, make_problem


@pytest.fixture
def toy():
    """An implementation from outside: streaming, in a table's row of its own. ``steps``: what it was asked for."""
    steps = []

    def run(step):
        steps.append(step)
        return streaming.run(step)

    backend: Any = Backend("toy", "toy", chosen_on=("cpu",), sharded=True)
    backend.module = SimpleNamespace(
        unsupported=lambda step: "odd vocabularies are not its own" if step.vocab_size % 2 else None,
        run=run,
        UNSUPPORTED_PARAMS=("stream",),
    )
    backend.steps = steps
    others = dict(BACKENDS)
    BACKENDS.clear()
    BACKENDS.update({"toy": backend, **others})
    yield backend
    del BACKENDS["toy"]


CPU = torch.device("cpu")


def test_a_row_of_the_table_is_an_implementation(toy, process_group):
    """By name, chosen, compiled, warmed up, under tensor parallelism."""
    problem = make_problem(5, 300, 16, CPU)
    odd, expected = dataclasses.replace(problem, vocab_size=299), problem.sample("streaming")
    for impl in ("toy", None):
        assert torch.equal(problem.sample(impl), expected)
    assert len(toy.steps) == 2
    with pytest.raises(ValueError, match="impl='toy' cannot do this: odd vocabularies are not its own"):
        odd.sample("toy")
    assert_agreement(odd.sample(None), odd)
    assert len(toy.steps) == 2
    torch._dynamo.reset()
    assert torch.equal(torch.compile(lambda: problem.sample("toy"), fullgraph=True)(), expected)
    assert flashsampling.warmup(problem.weight, impl="toy") == []
    with TensorParallel(None, problem.weight, impl="toy") as tp:
        assert torch.equal(problem.sample(None, tp), expected)


def test_what_a_backend_does_not_do_is_refused_by_name(toy, monkeypatch, no_machine):
    """Never done as if it had not been asked for."""
    step = make_problem(3, 300, 16, CPU).step()
    recovery = step._replace(params=SamplingParams(stream=Stream.RECOVERY))
    assert toy.unsupported(step) is None
    assert toy.unsupported(recovery) == "it does not do stream"
    cute = BACKENDS["cute"]
    if cute.missing is None:
        for missing, reason in (
            (None, "tensors on cpu"),
            ("triton is not installed", "it does not do stream: triton is not inst"),
        ):
            monkeypatch.setattr(cute, "params_missing", missing)
            assert cute.unsupported(recovery).startswith(reason)
            assert cute.unsupported(step).startswith("tensors on cpu")
        monkeypatch.setattr(cute, "params_missing", None)
        assert cute.unsupported(recovery._replace(shard=Shard(7))) == "a shard of a vocabulary with stream"
    with pytest.raises(ValueError, match="impl='toy' cannot do this: it does not do stream"):
        ops.sample(recovery, "toy")
    assert torch.equal(ops.sample(recovery, "").ids, ops.sample(recovery, "reference").ids)
    assert not toy.steps
    monkeypatch.setattr(BACKENDS["streaming"], "unsupported_params", ("stream",))
    with pytest.raises(
        ValueError, match="no implementation can do this on cpu: toy: it does not do stream; streaming: it does"
    ):
        ops.sample(recovery, "")
    assert (
        BACKENDS["reference"].unsupported(step._replace(shard=Shard(7, exchange_protocol.PACKED))).startswith("a shard")
    )


@pytest.mark.parametrize("impl", ["streaming", "reference"])
def test_streams_share_no_noise(impl):
    step = make_problem(64, 3000, 16, CPU, logit_std=0.1).step(temperature=1.0)
    drawn = [ops.sample(step._replace(params=SamplingParams(stream=stream)), impl).ids for stream in Stream]
    for a, b in ((0, 1), (0, 2), (1, 2)):
        assert (drawn[a] == drawn[b]).float().mean() < 0.1


def test_an_operator_takes_no_name_for_another():
    """Contract: a named implementation never falls back, through ``torch.ops`` either."""
    step = make_problem(3, 300, 16, CPU).step()
    with pytest.raises(ValueError, match="impl must be None or one of cute, triton, streaming, reference, got 'tritn'"):
        torch.ops.flashsampling.sample.default(*ops._flatten_inputs(step), step.vocab_size, "tritn")


def test_a_step_is_put_together_as_it_was():
    problem = make_problem(3, 300, 16, CPU, num_samples=2)
    numbers = {"temperature": 0.7, "seed": -5, "offset": 2**62}
    for step in (
        problem.step(),
        problem.step(**numbers),
        problem.step(seed=3, params=SamplingParams(Stream.RECOVERY)),
        problem.step(shard=Shard(64, exchange_protocol.PACKED), vocab_size=13),
    ):
        params = ops._flatten_params(step.params)
        again = ops._unflatten_inputs(tuple(ops._flatten_inputs(step)), params, step.vocab_size, step.shard)
        assert all(a is b or a == b for a, b in zip(again, step))
        assert (again.params is DEFAULT_PARAMS) == (step.params is DEFAULT_PARAMS)
    for operator, logits in (
        (torch.ops.flashsampling.sample, ()),
        (torch.ops.flashsampling.sample_from_logits, ("logits",)),
    ):
        schema = operator.default._schema
        names = {argument.name.removesuffix("_value") for argument in schema.arguments}
        heads = {"hidden_states", "weight"}
        given = set(logits) or heads
        elsewhere = {"shard", "params", "logits", "drafted", "draft_hash"}  # the last three of other operators
        assert names == (set(SampleInputs._fields) - elsewhere - heads) | given | set(SamplingParams._fields) | {"impl"}
        assert [result.name for result in schema.returns] == list(SampleResult._fields)


def test_versions_of_what_a_backend_needs(monkeypatch):
    package = Package("triton", "triton", (3, 6), hint=" (pip install x)")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    for version in ("3.6.0", "3.10.1", "4.0.0+git1234", "3.6"):
        monkeypatch.setattr(importlib.metadata, "version", lambda name, version=version: version)
        assert package.missing() is None, version
    for version in ("3.5.9", "2.99", "3.4.0+cu128"):
        monkeypatch.setattr(importlib.metadata, "version", lambda name, version=version: version)
        assert package.missing() == f"triton {version} is installed, it needs 3.6 or newer"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert package.missing() == "triton is not installed (pip install x)"
