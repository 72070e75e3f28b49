"""What a shard's requests are made of compiles for every architecture we name, without a GPU, as it is launched."""

import pytest

pytest.importorskip("triton")

from tests.kernels.triton.target import output_of

# the launches themselves, with a driver that names a target and has no device; compiled and not run
COMPILE = """
import sys
import torch
from flashsampling.exchange_protocol import PACKED, Shard
from flashsampling.tensor_parallel.cutoffs import FixedPointScale, Shards
from flashsampling.kernels.triton.sharded import cutoffs, collectives, shard_logits
from flashsampling.inputs import SampleInputs
from flashsampling.sampling_params import SamplingParams
from tests.kernels.triton.target import compile_only

compiled = compile_only(int(sys.argv[1]))

def ints(*shape, dtype=torch.int32):
    return torch.zeros(shape, dtype=dtype)

vocab, first = 50_000, 30_001
params = SamplingParams(
    bias=torch.zeros(vocab), logit_scale=2.0, soft_cap=30.0, dense_bias=torch.zeros(vocab), bias_ids=ints(2, 20),
    bias_values=torch.zeros(2, 20), counts=ints(2, vocab), repetition_penalty=1.2, token_mask=ints(2, -(-vocab // 32)),
)
logits = torch.empty(2, vocab)
seeds = ints(2, dtype=torch.int64)
step = SampleInputs(logits, logits, torch.ones(2), seeds, seeds, 3, vocab, shard=Shard(first, PACKED), params=params)
shard_logits.processed(step, logits)
shard_logits.processed(step._replace(params=SamplingParams(token_mask=params.token_mask)), logits)
shard_logits.processed(step._replace(params=SamplingParams(logit_scale=2.0)), logits)
shard_logits.shard_winners(step, logits, seeds)
one = ints(1, dtype=torch.int64)
collectives.all_gather(1 << 40, ints(4096, dtype=torch.int64), 8, one, one, ints(1), step)
words, wanted = ints(4096, dtype=torch.int64)[1:4], ints(2, dtype=torch.int64)[1:]
collectives.all_gather(1 << 40, words, 8, one, wanted, ints(2)[1:], step)
assert compiled.pop() is compiled[-1]  # of no other alignment, as other ranks may wait by then
scale = FixedPointScale(torch.zeros(2), torch.ones(2), 1 << 45)
parts = Shards(1, [(0, first), (first, first + vocab)], 512)

def meet(words, wanted=None):
    return torch.zeros(2, *words.shape, dtype=torch.int64)

for top_k in (20, 128):
    _, keys = cutoffs.highest(step, logits)
    cutoffs.of_few(meet, logits, keys, top_k, 0.9, scale, parts)
ks, shapes = ints(2, dtype=torch.int64), (meet, logits, keys)
cutoffs.of_top_k_and_p(*shapes, ks, torch.ones(2), scale, first + vocab, parts)
cutoffs.of_top_k_and_p(*shapes, ints(2), 0.9, scale, first + vocab, parts)
limit = cutoffs.of_top_k(meet, logits, keys, ints(2), scale, first + vocab, parts)
cutoffs.of_top_p(meet, logits, keys, scale, torch.ones(2), limit, first + vocab, parts)
cutoffs.of_top_p(meet, logits, keys, scale, 0.5, None, first + vocab, parts)
cutoffs.of_min_p(logits, keys, scale, 0.5)
cutoffs.mass_of(logits, seeds, scale, first)
different = {kernel.hash: kernel for kernel in compiled}
for kernel in different.values():
    assert kernel.metadata.shared <= 48 * 1024
    usage = kernel.asm["cubin"]
    print(kernel.metadata.name, len(usage))
assert len(different) == 3 + 18, len(different)  # other transforms, a width of digits, a place of a row compile nothing
"""


@pytest.mark.quick(0)
@pytest.mark.parametrize("capability", [80, 90])
def test_compiles(capability):
    printed = output_of(COMPILE, capability)
    assert all(int(line.split()[1]) > 0 for line in printed.strip().splitlines())
