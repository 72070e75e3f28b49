"""The calls of ``example_calls`` compile every kernel that any mix of parameters needs, on one GPU and over ranks. On
one GPU mixes of the same kinds need the same kernels."""

import itertools

import pytest

pytest.importorskip("triton")

import torch

from flashsampling.backends import BACKENDS
from flashsampling.exchange_protocol import PACKED, WHOLE, Shard
from flashsampling.inputs import SampleInputs
from flashsampling.integrations.engine.kernel_variants import (
    FEW_BIASES,
    FILTERS,
    PENALTIES,
    default_rows,
    example_calls,
)
from flashsampling.kernels.triton.filtered import dispatch, sparse_bias
from flashsampling.kernels.triton.fused import logits_gemm
from flashsampling.kernels.triton.sharded import collectives, param_hash
from flashsampling.outputs import SampleResult
from flashsampling.param_parsers import BatchShape
from flashsampling.sampling_params import DEFAULT_PARAMS, parse_sampling_params
from flashsampling.tensor_parallel.filtered_sampling import Part, draw
from flashsampling.tensor_parallel.message import Hashes
from flashsampling.tensor_parallel.p2p import PeerToPeer
from flashsampling.token_counts import TokenCounts
from tests.kernels.triton.target import LaunchKeys
from tests.mixes import Mix

BATCH, DIM, RANKS = 3, 16, 2
KERNELS = (
    (dispatch, "block_stats_kernel"),
    (dispatch, "filtered_sample_kernel"),
    (dispatch, "logprobs_kernel"),
    (logits_gemm, "logits_gemm_kernel"),
    (sparse_bias, "sparse_bias_kernel"),
    (collectives, "push_kernel"),
    (collectives, "all_gather_kernel"),
    (param_hash, "hash_kernel"),
)


class Peer(PeerToPeer):
    """The transport of rank 1, whose peer is not there."""

    def __init__(self, vocab):
        self._hashes, self._buffer_at, self._row_stride = Hashes(64, torch.device("cpu")), 1 << 20, -(-vocab // 4) * 4
        self._rank, self._ranks, self.room, self.rows_at_once, self._failed = 1, RANKS, 1 << 14, 64, None
        self._table, self._buffer, self._vocab_size = 1 << 40, torch.zeros(64 // RANKS, self._row_stride), vocab


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


@pytest.fixture
def compiled(impl, monkeypatch):
    """Returns a function that returns the kernels that a call needs, by names and keys. Nothing runs."""
    stubs = {name: LaunchKeys(getattr(module, name)) for module, name in KERNELS}
    for module, name in KERNELS:
        monkeypatch.setattr(module, name, stubs[name])
    hopper: set[tuple[str, object]] = set()
    if impl == "cute":
        pytest.importorskip("cutlass")
        from flashsampling.kernels.hopper import launch

        def launched(step, config=None, features=None, extra_arguments=()):
            if step.params is not DEFAULT_PARAMS:
                return run(step, config)
            hopper.add(("hopper", features))
            return SampleResult(torch.zeros(len(step.hidden_states), dtype=torch.int64))

        run = launch.run
        monkeypatch.setattr(launch, "run", launched)
        monkeypatch.setattr(BACKENDS["cute"].module, "run", launched)

    def kernels(draw, *arguments):
        hopper.clear()
        for stub in stubs.values():
            stub.seen.clear()
        draw(*arguments)
        return {(name, key) for name, stub in stubs.items() for key in stub.seen} | hopper

    return kernels


def step_of(params, batch, vocab, shard=WHOLE):
    states, weight = (torch.zeros(rows, DIM, dtype=torch.bfloat16) for rows in (batch, vocab))
    ones, zeros = torch.ones(batch), torch.zeros(batch, dtype=torch.int64)
    return SampleInputs(states, weight, ones, zeros, zeros, 1, vocab, shard, params)


def engine_calls(batch, vocab):
    """Returns the calls that an engine compiles before it serves, and their parser."""
    counts, shape = TokenCounts(batch, vocab).read(batch), BatchShape(batch, vocab, vocab, torch.device("cpu"), 1)
    plain, *calls = example_calls(default_rows(batch, torch.device("cpu")), vocab, counts)
    assert plain == {}
    return calls, lambda call: parse_sampling_params(call, shape)


# ``spare``: of each call, whether the other calls compile all its kernels
@pytest.mark.quick(2)
@pytest.mark.parametrize(
    ("impl", "spare"), [("triton", [True, True, False, False]), ("cute", [False, False, True, False])]
)
@pytest.mark.parametrize("vocab", [320, 331])  # rows at multiples of 16 tokens, and others
def test_any_mix(vocab, impl, spare, compiled):
    calls, parsed = engine_calls(BATCH, vocab)

    def run(params):
        BACKENDS[impl].run(step_of(params, BATCH, vocab))

    warm = [compiled(run, parsed(call)) for call in calls]
    assert [own <= set().union(*warm[:n], *warm[n + 1 :]) for n, own in enumerate(warm)] == spare
    mixes = [params for seed in range(300) if (params := random_params(seed, vocab)) is not DEFAULT_PARAMS]
    by_kinds: dict[tuple[bool, ...], set[tuple[str, object]]] = {}
    for params in mixes:
        kernels = compiled(run, params)
        assert by_kinds.setdefault(kinds_of(params), kernels) == kernels
    used = set().union(*by_kinds.values())
    assert used <= set().union(*warm)
    names = [name for name, _ in used]
    assert names.count("filtered_sample_kernel") == names.count("logprobs_kernel") == 1
    assert names.count("block_stats_kernel") == (2 if impl == "triton" else 1)


@pytest.mark.parametrize("impl", ["triton", "cute"])
def test_any_call_of_ranks(impl, compiled):
    """Over ranks a call has tensors of the filters that any row has. Batches of one row and of more."""
    vocab, first = 2005, 1000

    def run(params, batch):
        step = step_of(params, batch, vocab - first, Shard(first, PACKED))
        if BACKENDS[impl].runs_on_shard(step):
            BACKENDS[impl].run(step)
        else:
            draw(Part(Peer(vocab), BACKENDS[impl], [(0, first), (first, vocab)], 1, vocab), step)

    warm: set[tuple[str, object]] = set()
    used: set[tuple[str, object]] = set()
    for batch in (1, 8):
        calls, parsed = engine_calls(batch, vocab)
        warm |= set().union(*(compiled(run, parsed(call), batch) for call in calls))
    for batch in (1, 2, 5, 8):
        (*_, everything), parsed = engine_calls(batch, vocab)
        few = tuple(part[:, :FEW_BIASES].contiguous() for part in everything["logit_bias"])
        everything |= {"few": few, "top_logprobs": 7}
        groups = [[name] for name in (*FILTERS, "token_mask", "logit_bias", "few")]
        groups += [["token_counts", *PENALTIES], ["return_logprobs", "top_logprobs"]]
        for chosen in itertools.product((False, True), repeat=len(groups)):
            call = {name: everything[name] for names, has in zip(groups, chosen) if has for name in names}
            if "few" in call:
                call["logit_bias"] = call.pop("few")
            if call:
                used |= compiled(run, parsed(call), batch)
    assert used == warm
    names = {"push_kernel", "all_gather_kernel", "filtered_sample_kernel", "hash_kernel", "block_stats_kernel"}
    assert names | ({"sparse_bias_kernel"} if impl == "cute" else set()) <= {name for name, _ in used}
