"""Two steps per problem for Nsight Compute; the profiles in docs/ are of the second. KERNEL is triton or cute.

ncu --clock-control none -k "regex:sample_kernel|SampleKernel" --metrics
dram__throughput.avg.pct_of_peak_sustained_elapsed,\
sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed,sm__inst_executed_pipe_alu.avg.pct_of_peak_sustained_elapsed,\
sm__inst_issued.avg.pct_of_peak_sustained_elapsed,smsp__sass_inst_executed_op_local.sum python -m
benchmarks.profile_step KERNEL
"""

import sys

import torch

from .sample import make_problem, make_weight

if __name__ == "__main__":
    for vocab, dim in ((151936, 4096), (151936, 2048)):
        weight = make_weight(vocab, dim)
        for batch in (1, 64, 128, 256):
            problem = make_problem(batch, weight)
            for _ in range(2):
                problem.sample(sys.argv[1])
            torch.cuda.synchronize()
