"""The operator of a step with other ranks, here with a group of one: what compilers keep of it, which calls are
counted."""

import io

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch.overrides import BaseTorchFunctionMode

import flashsampling
from flashsampling import LMHeadSampler
from flashsampling.tensor_parallel import TensorParallel

WEIGHT = torch.randn(50, 8, generator=torch.Generator().manual_seed(0))
STATES = torch.randn(3, 8, generator=torch.Generator().manual_seed(1))
SEEDS = torch.arange(3)


class Group(TensorParallel):
    """Writes down its steps."""

    steps: list

    def finish(self, out, step):
        rows = step.rows()  # a compiler may make a row for each of a number
        self.steps.append((self.name, out.numel(), [values.tolist() for values in rows], step.num_samples))
        return super().finish(out, step)


@pytest.fixture
def groups(process_group):
    """Two, and the list of all their steps."""
    groups = [Group(None, WEIGHT, max_num_samples=3) for _ in range(2)]
    steps: list = []
    for group in groups:
        group.steps = steps
    return *groups, steps


def draw(states, tp, offset=0, **options):
    return flashsampling.sample(states, WEIGHT, seed=SEEDS[: len(states)], offset=offset, tp=tp, **options).token_ids


DRAFTS = {"draft_token_ids": torch.tensor([[5, 6]]), "method": "rejection"}
MATCH = {"draft_token_ids": torch.tensor([[5, 6]]), "method": "match"}
PROBS = torch.full((1, 2, 50), 0.02)


def reject(states, tp, **options):
    """Three rows are the positions of one request's two drafts."""
    options = {**DRAFTS, "seed": 3, **options}
    return flashsampling.verify(states[None], WEIGHT, tp=tp, **options)


def test_opcheck(groups):
    (a, b, _), operator = groups, torch.ops.flashsampling.sample_sharded
    rows = (torch.ones(3), 0.0, SEEDS, 0, SEEDS, 0)
    numbers = (None, 0.7, None, 5, None, 6)
    for arguments in ((*rows, 0, 1, a.name), (*numbers, 0, 3, b.name)):
        torch.library.opcheck(operator.default, (STATES, WEIGHT, *arguments, a.order))
        torch.library.opcheck(operator.exported, (STATES, WEIGHT, *arguments))
    params = {"top_k_value": 5, "top_p": torch.full((3,), 0.9), "logprobs": True, "top_logprobs": 2}
    step = (STATES, WEIGHT, *rows, 0, 1, a.name)
    torch.library.opcheck(operator.default, (*step, a.order), params)
    torch.library.opcheck(operator.exported, step, params)
    drafted = {"draft_token_ids": torch.tensor([[5, 6]]), "draft_rows": torch.arange(3)[None], "top_k_value": 5}
    drafted["draft_places"] = torch.arange(2)[None]
    torch.library.opcheck(operator.default, (*step, a.order), {"draft_hash": torch.tensor(5)})
    torch.library.opcheck(operator.default, (*step, a.order), drafted)
    torch.library.opcheck(operator.exported, step, drafted | {"draft_probs": torch.full((2, 50), 0.02)})
    assert operator.default._schema.is_mutable
    assert not torch.ops.flashsampling.sample.default._schema.is_mutable


def unused(states, a, b, offset):
    for i, tp in enumerate((a, b, a)):
        draw(states + i, tp, offset + i)
    return states + 1


def used_backwards(states, a, b, offset):
    first, second = draw(states, b, offset), draw(states, a, offset + 1)
    return second, states * 2, first


@pytest.mark.quick(2)
@pytest.mark.parametrize(("backend", "dynamic"), [("aot_eager", True), ("inductor", False)])
@pytest.mark.parametrize("function", [unused, used_backwards])
def test_every_step_is_taken_and_in_order(function, backend, dynamic, groups):
    """Trap 33."""
    a, b, steps = groups
    torch._dynamo.reset()
    compiled = torch.compile(function, backend=backend, fullgraph=True, dynamic=dynamic)
    for states in (STATES, STATES[:2]) if dynamic else (STATES,):
        for offset in (1, 2):
            offsets = torch.full((len(states),), offset)
            expected, steps_expected = function(states, a, b, offsets), list(steps)
            steps.clear()
            for got, wanted in zip(compiled(states, a, b, offsets), expected):
                assert torch.equal(got, wanted)
            assert steps == steps_expected
            assert len(steps) == (3 if function is unused else 2)
            steps.clear()


def test_a_sampler_in_a_compiled_function(groups):
    tp, _, steps = groups
    eager, traced = (LMHeadSampler(WEIGHT, max_batch_size=4, seed=7, tp=tp) for _ in range(2))

    def twice(states):
        traced(states)
        traced(states * 2)
        return states + 1

    torch._dynamo.reset()
    compiled = torch.compile(twice, fullgraph=True)
    for _ in range(2):
        eager(STATES)
        eager(STATES * 2)
        expected = list(steps)
        steps.clear()
        compiled(STATES)
        assert steps == expected
        steps.clear()
    assert torch.equal(traced.offsets, eager.offsets)


def test_one_program_for_rejected_drafts_of_any_number_of_requests(groups):
    a, *_ = groups
    torch._dynamo.reset()
    programs = []

    def noted(graph, inputs):
        programs.append(graph)
        return graph

    def verified(states, ids, seed):
        return flashsampling.verify(states, WEIGHT, ids, seed=seed, method="rejection", tp=a).token_ids

    compiled = torch.compile(verified, backend=noted, fullgraph=True, dynamic=True)
    for batch in (5, 6, 7, 9):
        states, ids = torch.randn(batch, 3, 8), torch.randint(50, (batch, 2))
        assert torch.equal(compiled(states, ids, torch.arange(batch)), verified(states, ids, torch.arange(batch)))
    assert len(programs) == 1


def test_drafts_of_one_rank_are_those_without_a_group(groups):
    """Rejected, in chains of any layout."""
    tp, _, _ = groups
    for options in ({}, {"draft_probs": PROBS}, {"top_k": 9, "draft_probs": PROBS.bfloat16()}, {"temperature": 0.0}):
        for seed in range(4):
            ours = reject(STATES, tp, **options, seed=seed)
            expected = flashsampling.verify(STATES[None], WEIGHT, **DRAFTS, seed=seed, **options)
            assert torch.equal(ours.token_ids, expected.token_ids)
            assert torch.equal(ours.num_emitted, expected.num_emitted)
            assert ours.accepted_drafts is None


def test_what_is_said_to_be_written_stays_in_its_place(groups):
    """Else Inductor would not put the function into a CUDA graph: "skipping cudagraphs due to mutated inputs"."""
    tp, other, _ = groups
    assert tp.order is other.order  # one for all groups, so that their order is kept too
    seen = []

    def compiler(graph, inputs):
        metadata = torch._guards.TracingContext.get().fw_metadata
        written = [i for i, info in enumerate(metadata.input_info) if info.mutates_data]
        seen.append((written, list(metadata.static_input_indices)))
        return graph

    torch._dynamo.reset()
    torch.compile(lambda states: draw(states, tp), backend=aot_autograd(fw_compiler=compiler), fullgraph=True)(STATES)
    ((written, static),) = seen
    assert len(written) == 1
    assert set(written) <= set(static)


def two_draws(states, tp):
    draw(states * 2, tp)
    return (draw(states, tp),)


def three_drafts(states, tp):
    reject(states * 2, tp)
    return reject(states, tp, draft_probs=PROBS).token_ids, reject(states, tp, **MATCH).token_ids


@pytest.mark.parametrize(("function", "calls"), [(two_draws, 2), (three_drafts, 3)])
def test_exports(function, calls, groups):
    tp, _, steps = groups

    class Program(torch.nn.Module):
        def forward(self, states):
            return function(states, tp)

    expected = Program()(STATES)
    exported = torch.export.export(Program(), (STATES,))
    assert sum("sample_sharded" in str(node.target) for node in exported.graph.nodes) == calls
    file = io.BytesIO()
    torch.export.save(exported, file)
    file.seek(0)
    for program in (exported, torch.export.load(file), exported.run_decompositions()):
        steps.clear()
        assert all(map(torch.equal, program.module()(STATES), expected))
        assert len(steps) == 2 or function is three_drafts  # rejection takes messages of its own
    if function is two_draws:
        steps.clear()
        assert torch.equal(torch.compile(program.module())(STATES)[0], expected[0])
        assert steps  # with torch before 2.10 Inductor drops the one whose tokens are unused


def test_a_compiled_function_says_that_its_group_is_gone(groups):
    tp = Group(None, WEIGHT)
    tp.steps = []
    exported = torch.export.export(_Step(tp), (STATES,)).module()
    exported(STATES)
    torch._dynamo.reset()
    compiled = torch.compile(lambda states: draw(states, tp), fullgraph=True)
    compiled(STATES)
    tp.close()
    with pytest.raises(ValueError, match="tp must be open, it has been closed"):
        compiled(STATES)
    with pytest.raises(ValueError, match=r"must be open.* an exported program needs its TensorParallel open"):
        exported(STATES)


class _Step(torch.nn.Module):
    def __init__(self, tp):
        super().__init__()
        self.name = tp.name

    def forward(self, states):
        rows = (None, 1.0, None, 5, None, 6, 0, 1, self.name)
        return torch.ops.flashsampling.sample_sharded.exported(states, WEIGHT, *rows)[0]


def test_an_exported_program_cannot_overrun_the_buffers(groups):
    """The bounds hold where the step is taken, not where it is traced."""
    tp = Group(None, WEIGHT, max_batch_size=4)
    tp.steps = []
    batch = torch.export.Dim("batch", min=1, max=64)
    program = torch.export.export(_Step(tp), (STATES,), dynamic_shapes=({0: batch},)).module()
    program(STATES)
    with pytest.raises(ValueError, match=r"at most tp\.max_batch_size = 4 rows, got 6"):
        program(STATES.repeat(2, 1))
    assert tp.skipped_calls == 1


def dispatched(*arguments, **options):
    """``draw`` where somebody looks."""
    with BaseTorchFunctionMode():
        return draw(*arguments, **options)


LEFT_OUT = {
    "no rows": lambda tp: draw(STATES[:0], tp),
    "no seed": lambda tp: flashsampling.sample(STATES, WEIGHT, tp=tp),
    "not a matrix": lambda tp: draw(STATES[0], tp),
    "another weight": lambda tp: flashsampling.sample(STATES, WEIGHT[:9], seed=1, tp=tp),
    "too many rows": lambda tp: flashsampling.sample(STATES.repeat(99, 1), WEIGHT, seed=1, tp=tp),
    "offsets of another length": lambda tp: draw(STATES, tp, offset=[1, 2]),
    "too many draws": lambda tp: draw(STATES, tp, num_samples=4),
    "a number of draws that is none": lambda tp: draw(STATES, tp, num_samples="2"),
    "through the dispatcher": lambda tp: dispatched(STATES, tp, num_samples=1.5),
    "impl": lambda tp: draw(STATES, tp, impl="reference"),
    "vocab_size": lambda tp: draw(STATES, tp, vocab_size=50),
    "the module's batch": lambda tp: LMHeadSampler(WEIGHT, max_batch_size=2, seed=1, tp=tp)(STATES),
    "within the module": lambda tp: LMHeadSampler(WEIGHT, max_batch_size=9, seed=1, tp=tp)(
        STATES, temperature=[1.0, 2.0]
    ),
    "warmup": lambda tp: flashsampling.warmup(WEIGHT, max_batch_size=0, tp=tp),
    "drafts of no rows": lambda tp: (
        flashsampling.verify(
            torch.zeros(0, 3, 8), WEIGHT, torch.zeros(0, 2).long(), seed=1, tp=tp, method="rejection"
        ).num_accepted
    ),
    "drafts of another shape": lambda tp: reject(STATES[:2], tp),
    "drafts' probabilities of a shard": lambda tp: reject(STATES, tp, draft_probs=PROBS[..., :30]),
    "drafts in trees": lambda tp: reject(STATES, tp, parents=torch.tensor([[-1, 0]])),
    "drafts without a seed": lambda tp: reject(STATES, tp, seed=None),
    "drafts of too many rows": lambda tp: flashsampling.verify(
        torch.zeros(99, 3, 8), WEIGHT, torch.zeros(99, 2).long(), seed=torch.arange(99), tp=tp, method="rejection"
    ),
    "compiled, no rows": lambda tp: torch.compile(draw, backend="eager", fullgraph=True)(STATES[:0], tp),
    "compiled, refused by the tracer": lambda tp: torch.compile(draw, backend="eager")(STATES, tp, offset=[1, 2]),
    "compiled, too many draws": lambda tp: torch.compile(draw, backend="eager", fullgraph=True)(
        STATES, tp, num_samples=4
    ),
}


SAID = {
    "no seed": "seed must be given",
    "another weight": "weight must be the shard",
    "too many rows": "at most tp.max_batch_size = 256 rows, got 297",
    "too many draws": "num_samples must be at most",
    "impl": "impl must be None or tp.impl",
    "vocab_size": "vocab_size must be given to TensorParallel",
}


@pytest.mark.parametrize("case", LEFT_OUT)
def test_calls_that_take_no_part_in_a_step_are_counted_once(case, groups):
    tp, other, steps = groups
    torch._dynamo.reset()
    if "no rows" in case:
        assert LEFT_OUT[case](tp).shape == (0,)
    else:
        with pytest.raises((TypeError, ValueError, RuntimeError), match=SAID.get(case)):
            LEFT_OUT[case](tp)
    assert (tp.skipped_calls, other.skipped_calls, steps) == (1, 0, [])
    draw(STATES, tp)
    assert tp.skipped_calls == 1


def test_what_is_no_call_is_not_counted(groups):
    tp, _, _ = groups
    for call in (
        lambda: LMHeadSampler(WEIGHT, temperature=-1, tp=tp),
        lambda: LMHeadSampler(WEIGHT, max_batch_size=2, tp=tp).reset([1, 2, 3]),
        lambda: draw(STATES, "tp"),
    ):
        with pytest.raises((TypeError, ValueError)):
            call()
    assert tp.skipped_calls == 0
