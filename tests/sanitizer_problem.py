"""Problems for compute-sanitizer, through every path of the kernels: ``python -m tests.sanitizer_problem [KERNEL...]``."""

import sys

import torch

from flashsampling import exchange
from flashsampling.impl.triton.config import TileConfig
from flashsampling.impl.triton.launch import run
from tests.problems import KERNELS, check, make_problem
from tests.test_exchange_kernel import Ranks

if __name__ == "__main__":
    device = torch.device("cuda", 0)
    kernels = sys.argv[1:] or KERNELS
    for batch, vocab, dim, dtype, num_samples in (
        (3, 1000, 128, torch.bfloat16, 1),
        (40, 700, 200, torch.bfloat16, 1),  # ragged in every direction
        (70, 700, 72, torch.float16, 1),
        (130, 300, 64, torch.bfloat16, 1),
        (170, 300, 72, torch.float16, 1),
        (200, 700, 64, torch.bfloat16, 1),
        (5, 300, 61, torch.bfloat16, 1),  # pointers: rows that the copy engine cannot address
        (5, 300, 64, torch.bfloat16, 3),
        (5, 300, 64, torch.float32, 1),
    ):
        for kernel in kernels:
            problem = make_problem(batch, vocab, dim, device, dtype, num_samples)
            check(kernel, problem)
            if kernel == "cute" and (dtype == torch.float32 or dim % 8):
                continue
            problem.hidden_states[1] = float("nan")  # the slow paths
            tokens = problem.sample(kernel)
            assert (tokens[1] == -1).all()
            print(kernel, batch, vocab, dim, dtype, num_samples, "agrees")
    problem = make_problem(130, 300, 64, device, torch.bfloat16)
    step = problem.step()
    assert torch.equal(run(step).ids, run(step, TileConfig(256, 64, 64, 8, 5, 1, True, 64, None, True)).ids)
    for kernel in kernels:  # shards that start in the middle of a tile, and an empty one
        parts = [problem.winners(kernel, first, last) for first, last in ((0, 100), (100, 100), (100, 300))]
        assert torch.equal(exchange.tokens_of(torch.stack(parts)), problem.sample(kernel)[:, 0])
        print(kernel, "shards agree")
        alone = Ranks(kernel, 1, 330)  # an exchange with itself, and one with a rank that does not come
        assert torch.equal(alone.draw({0: problem})[0], problem.sample(kernel))
        waiting = Ranks(kernel, 2, 330, seconds=0.1)
        assert (waiting.draw({0: problem})[0] == -1).all()
        assert (waiting.draw({1: problem})[1] == -1).all()
        print(kernel, "exchanges")
    torch.cuda.synchronize()
