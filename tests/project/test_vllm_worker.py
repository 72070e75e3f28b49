"""The benchmarks' functions inside vLLM: random weights' logits spread as they say, and steps are timed one by one."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from benchmarks.vllm_worker import Timed, spread_logits, stop_timing

VOCAB, DIM = 5000, 512


def worker_of(tied: bool, first: int = 0) -> SimpleNamespace:
    """A model whose layers do nothing, with the dummy weights and the last norm that vLLM gives one."""
    embedding, head = (nn.Parameter(torch.empty(VOCAB, DIM).uniform_(-1e-3, 1e-3)) for _ in range(2))
    shard = SimpleNamespace(padded_org_vocab_start_index=first)
    model = SimpleNamespace(
        lm_head=SimpleNamespace(weight=embedding if tied else head, shard_indices=shard),
        model=SimpleNamespace(embed_tokens=SimpleNamespace(weight=embedding), norm=nn.RMSNorm(DIM, eps=1e-6)),
    )
    return SimpleNamespace(model_runner=SimpleNamespace(model=model))


def logits_of(worker: SimpleNamespace, tokens: torch.Tensor) -> torch.Tensor:
    model = worker.model_runner.model
    return (model.model.norm(model.model.embed_tokens.weight[tokens]) @ model.lm_head.weight.T).detach()


@pytest.mark.parametrize("tied", [True, False])
def test_logits_spread_as_wanted_and_no_token_knows_itself(tied):
    torch.manual_seed(0)
    worker = worker_of(tied)
    spread_logits(worker, 4.0)
    tokens = torch.arange(200)
    logits = logits_of(worker, tokens)
    torch.testing.assert_close(logits.std(dim=1), torch.full((200,), 4.0), rtol=0.1, atol=0)
    assert (logits.argmax(dim=1) == tokens).float().mean() < 0.1
    assert 0.05 < logits.softmax(dim=1).amax(dim=1).median() < 0.9


def test_ranks_share_the_norm_and_nothing_else():
    workers = [worker_of(False, first) for first in (0, VOCAB)]
    for worker in workers:
        spread_logits(worker, 4.0)
    ours, theirs = (worker.model_runner.model for worker in workers)
    assert torch.equal(ours.model.norm.weight, theirs.model.norm.weight)
    assert not torch.equal(ours.lm_head.weight, theirs.lm_head.weight)
    assert not torch.equal(ours.lm_head.weight, ours.model.embed_tokens.weight)


def test_times_are_of_the_steps_of_all_rows(monkeypatch):
    class At(float):  # milliseconds on the GPU's clock
        def elapsed_time(self, later: "At") -> float:
            return later - self

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 2**20)
    drawn = torch.arange(10).view(5, 2, 1)
    steps = [  # tokens and rows, when the model, head and sampler began and ended, on the host too, bytes, tokens
        Timed(16, 2, At(0), At(5), At(6), 0.125, 2**22, drawn[0]),  # prompts
        Timed(2, 2, At(6), At(8), At(9), 0.125, 2**20, drawn[1]),
        Timed(2, 2, At(10), At(11), At(11.5), 0.125, 2**20, drawn[2]),
        Timed(1, 1, At(20), At(21), At(22), 0.125, 2**23, drawn[3, :1]),
        Timed(2, 2, At(30), At(31), At(31.25), 0.125, 2**20, drawn[4]),
    ]

    def stopped(steps: list[tuple]) -> dict:
        runner = SimpleNamespace(execute_model=None, sample=None, timed_steps=(steps, [3 * 2**20]))
        times = stop_timing(SimpleNamespace(model_runner=runner), 2)
        assert not vars(runner)  # as vLLM has it again
        return times

    times = stopped(steps)
    digest = times.pop("drawn")
    assert digest == stopped(steps)["drawn"] != stopped([*steps[:-1], steps[-1]._replace(drawn=drawn[3])])["drawn"]
    assert times == {
        "forward_ms": [2, 1, 1],
        "sample_ms": [1, 0.5, 0.25],
        "host_ms": [0.125] * 3,
        "tpot_ms": [2.5],  # not from the prompts' step, and not across that of one row
        "peak_MiB": 3,
        "sample_MiB": 4,
    }
