"""The plug-in on two ranks that share an LM head as vLLM shards it, over gloo: the tokens of one rank that has all of it."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from flashsampling.integrations.vllm import Refused
from flashsampling.integrations.vllm.head import Layers, head_of
from flashsampling.integrations.vllm.runner import Fused, FusedRunner, Vllm, group_of
from flashsampling.integrations.vllm.slots import Rules, Slots
from flashsampling.integrations.vllm.step import FusedStep

from . import vllm_fakes as fakes
from .vllm_fakes import LEFT, SamplingParams

V, D, SLOTS, RANKS = 331, 16, 4, 2
ROWS = 192  # of the 384 that 331 are padded to: vLLM pads to 64 and gives every rank as many


class Whole(FusedRunner, fakes.Runner):
    pass


class Gathering(fakes.Processor):
    """vLLM's logits processor with tensor parallelism."""

    def forward(self, lm_head, hidden_states, embedding_bias=None):
        mine = hidden_states @ lm_head.weight.T
        parts = [torch.empty_like(mine) for _ in range(RANKS)]
        dist.all_gather(parts, mine)
        return torch.cat(parts, dim=-1)[:, : self.org_vocab_size]


def runner_of(rank):
    """Of this rank's shard; None: of the whole head."""
    torch.manual_seed(0)
    np.random.seed(0)  # noqa: NPY002 # as vLLM does on every rank: seeds of requests that have none come from there
    model, tp = fakes.Model(V, D), None
    device, kind = torch.device("cpu"), fakes.Processor
    if rank is not None:
        layer = model.lm_head
        whole = torch.cat((layer.weight, torch.zeros(ROWS * RANKS - len(layer.weight), D)))
        layer.weight = torch.nn.Parameter(whole[rank * ROWS : (rank + 1) * ROWS].clone(), requires_grad=False)
        layer.tp_size, kind = RANKS, Gathering
        layer.shard_indices.padded_org_vocab_start_index = rank * ROWS
        layer.shard_indices.org_vocab_end_index = min((rank + 1) * ROWS, V)
        model.logits_processor = Gathering(V)
    head = head_of(model, D, torch.float32, device, Layers(kind, fakes.Embedding, fakes.Unquantized))
    if rank is not None:
        assert (head.first_token, head.ranks) == (rank * ROWS, RANKS)
        tp = group_of(head, dist.group.WORLD, SLOTS)
        with pytest.raises(Refused, match="a head that has soft_cap"):
            group_of(head._replace(transform={"soft_cap": 3.0}), dist.group.WORLD, SLOTS)
    sampler = fakes.Sampler(SLOTS, V)
    runner = Whole(model, sampler, [2, 0, 3, 1])
    step = FusedStep(head, sampler, Slots(SLOTS, Rules(V, raw_logprobs=True, plain_only=tp is not None)), device, tp)
    runner.flashsampling = Fused(step, Vllm(fakes.SamplerOutput, fakes.LogprobsTensors, fakes.get_num_sampled_and_rejected))
    return runner


def tokens_of(runner):
    """Of plain steps, and of a batch with a request that several ranks cannot do, which is split."""
    runner.add(
        a=([1, 2], SamplingParams(seed=5, temperature=3.0)),
        b=([3], SamplingParams(temperature=0.0)),
        c=([4, 5, 6], SamplingParams(seed=-7)),
    )
    drawn = []
    for step in range(4):
        batch = runner.batch({"c": 1, "a": 1, "b": 1})
        states = torch.randn(6, D, generator=torch.Generator().manual_seed(step))
        drawn.append(runner.sample(states, batch, None)[0].sampled_token_ids[:, 0].tolist())
    runner.finish("b")
    runner.add(d=([1], SamplingParams(top_k=5)))
    batch = runner.batch({"c": 1, "d": 1, "a": 1})
    states = torch.randn(6, D, generator=torch.Generator().manual_seed(9))
    drawn.append(runner.sample(states, batch, None)[0].sampled_token_ids[:, 0].tolist())
    return drawn


def rank_main(rank, folder, queue):
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    runner = runner_of(rank)
    runner._dummy_sampler_run(torch.zeros(SLOTS, D))
    drawn, counters = tokens_of(runner), runner.flashsampling.counters()
    runner.shutdown()
    assert runner.flashsampling.step.tp._closed
    queue.put((rank, drawn, counters))
    dist.destroy_process_group()


def test_two_ranks(tmp_path):
    wanted = tokens_of(runner_of(None))
    context = mp.get_context("spawn")
    queue = context.SimpleQueue()
    ranks = mp.spawn(rank_main, args=(tmp_path, queue), nprocs=RANKS, join=False)
    assert ranks is not None
    while not ranks.join(timeout=120):
        pass
    results = dict((rank, (drawn, counters)) for rank, drawn, counters in (queue.get() for _ in range(RANKS)))
    assert results[0] == results[1]
    drawn, counters = results[0]
    assert drawn[:4] == wanted[:4]
    assert (drawn[4][0], drawn[4][2]) == (wanted[4][0], wanted[4][2])  # which have seeds
    assert drawn[4][1] == LEFT
    assert (counters["fused"], counters["split"], counters["left"]) == (4, 1, 0)
