"""Problems for compute-sanitizer, through every path of the kernels: ``python -m
tests.kernels.hopper.sanitizer_problem [KERNEL...]``.

What a warp's threads read before ``bar.warp.sync``, its first thread's arrival at an mbarrier orders before what is
behind a wait for it. racecheck counts the thread that arrives alone, so of every CTA with a second tile it is expected
to report the noise warpgroup's codes against the consumers' reads of the last ones. With ``--all-arrive`` all threads
of a consumer warp arrive there, which is what it does understand; every other instruction is the same.
``tests.emulator`` finds races of the kernel as it is.
"""

import os
import sys
import tempfile

import torch

from flashsampling import exchange_protocol, ops
from flashsampling.kernels.triton.fused.config import TritonTileConfig
from flashsampling.kernels.triton.fused.launch import run
from flashsampling.sampling_params import SamplingParams
from tests.conftest import DEVICE
from tests.kernels.hopper.test_logits import make_step
from tests.kernels.triton.test_filtered import agrees
from tests.problems import KERNELS, check, make_problem
from tests.tensor_parallel.test_exchange_kernel import Ranks


def check_requests(kernel: str, batch: int) -> None:
    """Each kind of request, of more tiles than a GPU has multiprocessors: blocks below a row's cutoff are left out."""
    vocab = 20_003
    step = make_step(batch, vocab)
    rows, words = torch.rand(3, batch, device=DEVICE), -(-vocab // 32)
    ids = torch.randint(0, vocab, (batch, 7), device=DEVICE)
    penalties = SamplingParams(
        counts=(torch.rand(batch, vocab, device=DEVICE) < 0.1).int(),
        repetition_penalty=rows[0] + 0.5,
        frequency_penalty=rows[1],
        presence_penalty=rows[2],
        token_mask=torch.randint(-(2**31), 2**31 - 1, (batch, words), dtype=torch.int32, device=DEVICE),
    )
    of_filters = {"top_k": torch.randint(1, 80, (batch,), device=DEVICE), "top_p": rows[0]}
    biases = {"bias_ids": ids.int(), "bias_values": torch.ones(ids.shape, device=DEVICE)}
    logprobs = {"logprobs": True, "top_logprobs": 3, "logprob_ids": ids, "logsumexp": True}
    of_kinds = {
        "top-k top-p": SamplingParams(**of_filters),
        "top-p": SamplingParams(top_p=rows[0]),
        "min-p": SamplingParams(min_p=rows[0]),
        "log-probabilities": SamplingParams(**logprobs),
        "penalties and mask": penalties,
        "biases": SamplingParams(**biases),
        "biases, penalties, mask and filters": penalties._replace(**of_filters, **biases),
        "everything": penalties._replace(**of_filters, **biases, **logprobs),
    }
    steps = {name: step._replace(params=params) for name, params in of_kinds.items()}
    # a block without a greedy row: its draws are left to the second launch
    steps["top-k top-p, warm"] = steps["top-k top-p"]._replace(temperature=step.temperature.clamp(min=0.2))
    for name, one in steps.items():
        agrees(ops.sample(one, kernel), one, tolerance=2e-3)  # sums of products in another order
        print(kernel, batch, name, "agrees", flush=True)


def let_all_arrive() -> None:
    """At the codes' empty barriers, in every kernel that this process compiles; none of them is kept."""
    import cutlass
    import cutlass.cute as cute

    from flashsampling.kernels.hopper import shared_memory
    from flashsampling.kernels.hopper.gumbel_bounds import GumbelBounds

    @cute.jit
    def release(self, shared, iteration, thread, one_draw):
        cute.arch.sync_warp()
        if one_draw:
            cute.arch.mbarrier_arrive(shared.bounds_empty + self._buffer(iteration)[0])

    @cute.jit
    def init_barriers(of_cta, bound_buffers: cutlass.Constexpr, thread):
        if thread == 0:
            for buffer in cutlass.range_constexpr(bound_buffers):
                cute.arch.mbarrier_init(of_cta.bounds_full + buffer, shared_memory.NOISE_THREADS)
                cute.arch.mbarrier_init(of_cta.bounds_empty + buffer, shared_memory.CONSUMER_THREADS)

    GumbelBounds.release = release  # type: ignore[method-assign]
    shared_memory.init_barriers = init_barriers
    os.environ["FLASHSAMPLING_CACHE_DIR"] = tempfile.mkdtemp()


if __name__ == "__main__":
    kernels = [name for name in sys.argv[1:] if not name.startswith("--")] or KERNELS
    if "--all-arrive" in sys.argv and "cute" in kernels:
        let_all_arrive()
    for batch, vocab, dim, dtype, num_samples in (
        (3, 1000, 128, torch.bfloat16, 1),
        (40, 700, 200, torch.bfloat16, 1),  # ragged in every direction
        (70, 700, 72, torch.float16, 1),
        (130, 300, 64, torch.bfloat16, 1),
        (170, 300, 72, torch.float16, 1),
        (200, 700, 64, torch.bfloat16, 1),
        (5, 300, 61, torch.bfloat16, 1),  # pointers: rows that the copy engine cannot address
        (5, 20_003, 64, torch.bfloat16, 1),  # a second tile
        (70, 20_003, 72, torch.float16, 1),
        (200, 20_003, 72, torch.float16, 1),
        (5, 300, 64, torch.bfloat16, 3),
        (5, 300, 64, torch.float32, 1),
    ):
        for kernel in kernels:
            problem = make_problem(batch, vocab, dim, DEVICE, dtype, num_samples)
            check(kernel, problem)
            if kernel == "cute" and (dtype == torch.float32 or dim % 8):
                continue
            problem.hidden_states[1] = float("nan")  # the slow paths
            tokens = problem.sample(kernel)
            assert (tokens[1] == -1).all()
            print(kernel, batch, vocab, dim, dtype, num_samples, "agrees")
    problem = make_problem(130, 300, 64, DEVICE, torch.bfloat16)
    step = problem.step()
    assert torch.equal(run(step).ids, run(step, TritonTileConfig(256, 64, 64, 8, 5, 1, True, 64, None, True)).ids)
    for kernel in kernels:  # shards that start in the middle of a tile, and an empty one
        parts = [problem.winners(kernel, first, last) for first, last in ((0, 100), (100, 100), (100, 300))]
        assert torch.equal(exchange_protocol.tokens_of(torch.stack(parts)), problem.sample(kernel)[:, 0])
        print(kernel, "shards agree")
        for batch in (7, 70):
            check_requests(kernel, batch)
        alone = Ranks(kernel, 1, 330)  # an exchange with itself, and one with a rank that does not come
        assert torch.equal(alone.draw({0: problem})[0], problem.sample(kernel))
        waiting = Ranks(kernel, 2, 330, seconds=0.1)
        assert (waiting.draw({0: problem})[0] == -1).all()
        assert (waiting.draw({1: problem})[1] == -1).all()
        print(kernel, "exchanges")
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
