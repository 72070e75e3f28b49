"""The calls of ``example_calls`` compile every kernel that any mix of parameters needs. Mixes of the same kinds need
the same kernels."""

import pytest

pytest.importorskip("triton")

import torch

from flashsampling.backends import BACKENDS
from flashsampling.inputs import SampleInputs
from flashsampling.integrations.engine.kernel_variants import FEW_BIASES, default_rows, example_calls
from flashsampling.kernels.triton.filtered import dispatch, sparse_bias
from flashsampling.kernels.triton.fused import logits_gemm
from flashsampling.outputs import SampleResult
from flashsampling.param_parsers import BatchShape
from flashsampling.sampling_params import DEFAULT_PARAMS, parse_sampling_params
from flashsampling.token_counts import TokenCounts
from tests.kernels.triton.target import LaunchKeys
from tests.mixes import Mix

BATCH, DIM = 3, 16
KERNELS = (
    (dispatch, "block_stats_kernel"),
    (dispatch, "filtered_sample_kernel"),
    (dispatch, "logprobs_kernel"),
    (logits_gemm, "logits_gemm_kernel"),
    (sparse_bias, "sparse_bias_kernel"),
)


def random_params(seed, vocab):
    """Returns a mix as an engine's call has it: no filter that is a number and off, biases of one of two sizes."""
    params = Mix(seed, poisoned=False).params(BATCH, vocab)
    if params.bias_ids is not None:
        room = 0, FEW_BIASES - params.bias_ids.shape[1]
        ids = torch.nn.functional.pad(params.bias_ids, room, value=-1)
        params = params._replace(bias_ids=ids, bias_values=torch.nn.functional.pad(params.bias_values, room))
    if isinstance(params.top_k, int) and params.top_k >= vocab:
        params = params._replace(top_k=0)
    return params.normalized()


def kinds_of(params):
    """Returns which kinds of parameters a mix has: see ``warmup``."""
    head, others = ("bias", "logit_scale", "soft_cap"), ("dense_bias", "counts", "token_mask", "bias_ids")
    of_logits = (any(name in params.names() for name in names) for names in (head, others))
    return (*of_logits, params.bias_ids is not None, params.may_filter(), params.needs_raw_mass())


# ``spare``: of each call, whether the other calls compile all its kernels
@pytest.mark.quick(2)
@pytest.mark.parametrize(
    ("impl", "spare"), [("triton", [True, True, False, False]), ("cute", [False, False, True, False])]
)
@pytest.mark.parametrize("vocab", [320, 331])  # rows at multiples of 16 tokens, and others
def test_any_mix(vocab, impl, spare, monkeypatch):
    stubs = {name: LaunchKeys(getattr(module, name)) for module, name in KERNELS}
    for module, name in KERNELS:
        monkeypatch.setattr(module, name, stubs[name])
    run, device = BACKENDS["triton"].module.run, torch.device("cpu")
    hopper_seen: set[tuple[str, object]] = set()
    if impl == "cute":
        pytest.importorskip("cutlass")
        from flashsampling.kernels.hopper import dispatch as hopper
        from flashsampling.kernels.hopper import launch

        def launched(step, config=None, features=None, extra_arguments=()):
            hopper_seen.add(("hopper", features))
            return SampleResult(torch.zeros(BATCH, dtype=torch.int64))

        monkeypatch.setattr(launch, "run", launched)
        run = hopper.run
    states, weight = (torch.zeros(rows, DIM, dtype=torch.bfloat16) for rows in (BATCH, vocab))
    ones, zeros = torch.ones(BATCH), torch.zeros(BATCH, dtype=torch.int64)

    def compiled(params):
        hopper_seen.clear()
        for stub in stubs.values():
            stub.seen.clear()
        run(SampleInputs(states, weight, ones, zeros, zeros, 1, vocab, params=params))
        return {(name, key) for name, stub in stubs.items() for key in stub.seen} | hopper_seen

    counts, shape = TokenCounts(BATCH, vocab, device).read(BATCH), BatchShape(BATCH, vocab, vocab, device, 1)
    plain, *calls = example_calls(default_rows(BATCH, device), vocab, counts)
    assert plain == {}
    warm = [compiled(parse_sampling_params(call, shape)) for call in calls]
    assert [own <= set().union(*warm[:n], *warm[n + 1 :]) for n, own in enumerate(warm)] == spare
    mixes = [params for seed in range(300) if (params := random_params(seed, vocab)) is not DEFAULT_PARAMS]
    by_kinds: dict[tuple[bool, ...], set[tuple[str, object]]] = {}
    for params in mixes:
        kernels = compiled(params)
        assert by_kinds.setdefault(kinds_of(params), kernels) == kernels
    used = set().union(*by_kinds.values())
    assert used <= set().union(*warm)
    names = [name for name, _ in used]
    assert names.count("filtered_sample_kernel") == names.count("logprobs_kernel") == 1
    assert names.count("block_stats_kernel") == (2 if impl == "triton" else 1)
