"""Any two accesses of the Hopper kernel to memory of which one is a store are ordered, or atomic. Seen on the machine
of ``tests.emulator``, which keeps for every thread how far it is ordered behind the others (``races.h``): what
nothing orders is found whether or not it went well. compute-sanitizer's racecheck asks the same of a GPU, of shared
memory alone."""

import functools
import re

import pytest
import torch

from flashsampling.kernels.hopper import config, dispatch, launch
from flashsampling.sampling_params import SamplingParams
from tests import emulator
from tests.conftest import DEVICE
from tests.kernels.hopper.test_logit_transforms import everything, processed
from tests.kernels.hopper.test_logits import IDS, make_step, run_with_cutoffs, stored_share
from tests.kernels.hopper.test_nonzero_mask import known
from tests.kernels.test_exactness import awkward_rows, awkward_weight
from tests.problems import CUTE_SHAPES
from tests.tensor_parallel.test_exchange_kernel import Ranks, batch_shape

if DEVICE.type == "cuda" or emulator.why_not():
    pytest.skip(f"needs the machine: {emulator.why_not() or 'there is a GPU'}", allow_module_level=True)

from tests.emulator import hopper
from tests.emulator.machine import MachineError, settings

VOCAB = 700


def ptx_of(dtype, shape, features):
    """A kernel whose flag ``Shared.special`` is set by an atomic store. It only rises, and who sees it late searches a
    tile as it would have done before; a plain store, since with an atomic one ptxas makes other code of all that
    stands around it."""
    text = hopper.compiled(dtype, shape, features, "ptx").read_text()
    read = r"ld\.shared\.b32\s+(%r\d+), (\[\S+\]);\s+setp\.ne\.b32\s+%p\d+, \1, 0;\s+vote\.sync\.any"
    (flag,) = {where for _, where in re.findall(read, text)}
    text, many = re.subn(rf"st\.shared\.b32(\s+{re.escape(flag)}, 1;)", r"st.relaxed.cta.shared.b32\1", text)
    assert many
    return text


@functools.cache
def kernel_for(dtype, shape, features):
    return hopper.HopperKernel(ptx_of(dtype, shape, features), shape)


@pytest.fixture
def ctas(monkeypatch):
    def set_to(many):
        monkeypatch.setattr(launch, "multiprocessors", lambda device: many)
        launch._plan.cache_clear()

    launch._plan.cache_clear()
    yield set_to
    launch._plan.cache_clear()


@pytest.fixture(params=[0, 1])
def watched(request, monkeypatch, ctas):
    """Products that are computed as early as can be, and as late."""
    monkeypatch.setattr(settings, "watches", True)
    monkeypatch.setattr(settings, "late", 8 * request.param)
    monkeypatch.setattr(settings, "seed", 1000 * request.param)
    monkeypatch.setattr(launch, "kernel_for", kernel_for)
    return request.param


def rows_of(shape):
    return shape.block_b - 3


@pytest.mark.quick(1)
@pytest.mark.parametrize("shape", CUTE_SHAPES, ids=IDS)
def test_draws(shape, watched, ctas):
    """One and several, of rows of every kind, of a vocabulary and of a shard."""
    ctas(4)
    generator = torch.Generator().manual_seed(watched)
    problem = awkward_rows(awkward_weight(VOCAB, torch.bfloat16, generator), rows_of(shape), generator, poisoned=True)
    launch.run(problem.step(), shape)
    launch.run(problem.step(num_samples=2), shape)
    problem.winners("cute", 100, 500)


@pytest.mark.quick(0)
@pytest.mark.parametrize("shape", CUTE_SHAPES[:2], ids=IDS[:2])
def test_requests(shape, watched, ctas):
    """All that is done in registers, and logits with their block statistics."""
    ctas(4)
    step = make_step(rows_of(shape), VOCAB, 136)
    every = everything(rows_of(shape), VOCAB)
    for one in (every["cap"], every["one for all"], every["everything"]):
        processed(step, one, shape)
        launch.run(step._replace(params=one), shape)
        if one.counts is not None:
            few = one._replace(counts=torch.where(torch.rand(one.counts.shape) < 0.1, one.counts, 0))
            launch.run(step._replace(params=known(few)), shape)
    dispatch.run_with_logits(step, 1, (True, True), shape)


@pytest.mark.quick(0)
@pytest.mark.parametrize("shape", CUTE_SHAPES[:2], ids=IDS[:2])
def test_cutoffs(shape, watched, ctas):
    ctas(6)
    step = make_step(rows_of(shape), 3000, 64)
    stored_share(step, SamplingParams(top_k=5), shape)
    stored_share(step, SamplingParams(min_p=0.2), shape)
    stored_share(step._replace(temperature=1.0), SamplingParams(top_k=5), shape)  # which is deferred


@pytest.mark.quick(1)
@pytest.mark.parametrize("shape", CUTE_SHAPES[:2], ids=IDS[:2])
def test_marks_without_draws(shape, watched, ctas):
    ctas(4)
    step = make_step(rows_of(shape), VOCAB, 136)._replace(temperature=1.0)
    counts = torch.where(torch.rand(rows_of(shape), VOCAB) < 0.1, 3, 0).int()
    launch.run(step._replace(params=known(SamplingParams(counts=counts, presence_penalty=0.2, top_k=5))), shape)


@pytest.mark.quick(2)
@pytest.mark.parametrize(("batch", "num_samples"), [(5, 1), (40, 1), (5, 3)])
def test_exchange(batch, num_samples, watched):
    """Of a rank's own threads: what ranks order among each other is a model's
    (``tests/tensor_parallel/protocol_model.py``)."""
    ranks, problem = Ranks("cute", 3, 1000), batch_shape(batch, num_samples, vocab=500)
    for _ in range(3):
        ranks.draw(ranks.same_for_all(problem))
    ranks.draw({0: problem, 1: problem, 2: problem.rows(slice(0, 3))})


MUTATIONS = {  # of the kernel with logits
    "consumers do not wait for each other": (r"bar\.sync\s+1, 256;", "mov.b32 %r0, %r0;"),
    "nobody waits until the rows are prepared": (r"barrier\.cta\.sync 4, 480;", "bar.arrive 4, 480;"),
    "warps do not meet": (r"bar\.warp\.sync\s+-1;", "mov.b32 %r0, %r0;"),
    "the first tile is counted without order": (r"red\.release\.gpu", "red.relaxed.gpu"),
    "a stage is released before its products have read it": (
        r"wgmma\.wait_group\.sync\.aligned\s+1;",
        "mov.b32 %r0, %r0;",
    ),
}


@pytest.mark.quick(0)
@pytest.mark.parametrize("what", MUTATIONS)
def test_a_missing_order_is_found(what, ctas, monkeypatch):
    """Each of these is found as a race, in launches that may well give the right tokens."""
    pattern, instead = MUTATIONS[what]
    shape, kind = config.CONFIGS[0], config.KINDS["logits"]
    mutated, many = re.subn(pattern, instead, ptx_of(torch.bfloat16, shape, kind))
    assert many
    kernel = hopper.HopperKernel(mutated, shape)
    monkeypatch.setattr(settings, "watches", True)
    monkeypatch.setattr(settings, "late", 8)
    monkeypatch.setattr(launch, "kernel_for", lambda *_: kernel)
    ctas(6)
    step = make_step(7, 3000, 200)
    outputs = torch.empty(7, 3072), torch.empty(7, 96, dtype=torch.int32), torch.empty(7, 96)

    def fails():
        for seed in range(10):
            monkeypatch.setattr(settings, "seed", seed)
            run_with_cutoffs(step, SamplingParams(top_k=5), shape, outputs, torch.empty(7, dtype=torch.int32))

    with pytest.raises(MachineError, match="a race at"):
        fails()
