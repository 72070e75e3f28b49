"""The launches behind a kernel that wrote logits, block statistics and what rows draw without filters."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from flashsampling.inputs import SampleInputs
from flashsampling.kernels.triton.filtered import filtered_sample_kernel
from flashsampling.kernels.triton.filtered.dispatch import CONFIG, BlockStats, Config, Records, draw, empty_records, run
from flashsampling.kernels.triton.filtered.prefix import find_limit
from flashsampling.outputs import DEFERRED_DRAW, SampleResult, layout
from flashsampling.reference import logit_transforms, oracle
from flashsampling.sampling_params import DEFAULT_PARAMS, SamplingParams
from tests.conftest import DEVICE
from tests.kernels.triton.test_filtered import INF, SMALL, agrees, make_step, with_logits
from tests.mixes import Mix
from tests.problems import assert_same_rows

CUDA = DEVICE.type == "cuda"
VOCAB = 30_011 if CUDA else 389  # the last block of 128 tokens is not full


def key_of(x: Tensor) -> Tensor:
    bits = (x + 0.0).view(torch.int32)
    return torch.where(x.isnan(), 0x7FFFFFFF, bits ^ ((bits >> 31) & 0x7FFFFFFF))


def block_stats_of(step: SampleInputs, sums: bool = True) -> BlockStats:
    """As a kernel would make them: thread w of four has tokens 16 * w + {0..15} of both halves of a block of 128."""
    assert step.logits is not None
    blocks, temperature = in_blocks(step.logits), step.rows().temperature
    of_rows, of_one = (masses_of(blocks, each).float() for each in (temperature, torch.ones_like(temperature)))
    return BlockStats(key_of(blocks.amax(dim=2)), of_rows if sums else None, of_one)


def in_blocks(logits: Tensor, nothing: float = -INF) -> Tensor:
    """(B, blocks, 32), the two halves of a block side by side; ``nothing`` where there is no token."""
    padded = torch.nn.functional.pad(logits, (0, -logits.shape[1] % 128), value=nothing)
    return padded.view(len(logits), -1, 2, 4, 16).transpose(2, 3).reshape(len(logits), -1, 32)


def masses_of(blocks: Tensor, temperature: Tensor) -> Tensor:
    """(B, blocks) float64, as ``block_stats_kernel`` has it."""
    temperature = torch.where(temperature < logit_transforms.GREEDY_BELOW, 1.0, temperature)
    scale = (math.log2(math.e) / temperature.double()).clamp(min=2.0**-149)[:, None, None]
    top = blocks.amax(dim=2, keepdim=True)
    top = torch.where(top == -INF, 0.0, top).double()
    return torch.where(blocks == top, 0.0, (blocks.double() - top) * scale).exp2().sum(dim=2)


def by_token(stored: Tensor) -> Tensor:
    """The opposite of ``in_blocks``, (B, tokens)."""
    return stored.view(len(stored), -1, 4, 2, 16).transpose(2, 3).reshape(stored.shape)


def without_blocks(step: SampleInputs, missing: Tensor) -> Tensor:
    """The logits, of blocks ``missing`` (B, blocks) what may lie in memory: highest and other logits of the row too."""
    assert step.logits is not None
    logits = step.logits
    token = torch.arange(step.vocab_size, device=DEVICE)
    gone = missing[:, token // 128 * 4 + token // 16 % 4]
    anything = torch.tensor([math.nan, INF, -INF, 1e38, 1e38, 7.0], device=DEVICE)
    values = logits.sort(descending=True).values[:, :-1]
    others = torch.cat([anything.expand(len(logits), -1), values[:, : values.shape[1] // 8], values[:, :6]], dim=1)
    chosen = torch.randint(others.shape[1], logits.shape, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    few = torch.rand(logits.shape, generator=torch.Generator().manual_seed(2)).to(DEVICE) < 0.6
    chosen = torch.where(few, chosen % 6, chosen)
    return torch.where(gone, others.gather(1, chosen), logits)


def draw_filtered(
    step: SampleInputs,
    sums: bool = True,
    records: Records | None = None,
    cutoffs: Tensor | None = None,
    config: Config = SMALL,
    deferred: Tensor | bool = False,
) -> SampleResult:
    """Rows 16 bytes apart, what lies between them is not read, nor are blocks below ``cutoffs``, nor beside these the
    masses of rows with a top-k and no joint top-p; tokens without filters from the oracle, but of rows ``deferred``."""
    assert step.logits is not None
    unfiltered = oracle.run(step._replace(params=DEFAULT_PARAMS)).ids
    if DEVICE.type == "cuda":  # the kernel's own arithmetic, where two scores are next to equal
        unfiltered = run(step._replace(params=DEFAULT_PARAMS)).ids
    deferred = torch.as_tensor(deferred, device=DEVICE).expand(len(step.logits))
    if deferred.any():  # or else any token: of such a row it is never asked for
        other = torch.arange(len(step.logits), device=DEVICE) % 2 * (unfiltered >= 0) != 0
        told = torch.where(other, step.logits.nan_to_num(0.0).argmax(1), DEFERRED_DRAW)
        unfiltered = torch.where(deferred, told, unfiltered)
    block_stats = block_stats_of(step, sums)._replace(cutoffs=cutoffs)
    if cutoffs is not None:
        step = with_logits(step, without_blocks(step, block_stats.keys < cutoffs[:, None]))
        top_k = torch.as_tensor(step.params.top_k, device=DEVICE).expand(len(cutoffs))
        joint = torch.as_tensor(step.params.joint_top_p, device=DEVICE).expand(len(cutoffs)) != 0
        if block_stats.sums is not None:
            block_stats.sums[(top_k > 0) & (top_k < step.vocab_size) & ~joint] = math.nan
    assert step.logits is not None
    if cutoffs is None:
        wide = torch.nn.functional.pad(step.logits, (0, -step.vocab_size % 4 + 4), value=math.nan)
        logits = wide[:, : step.vocab_size]
    else:
        logits = in_blocks(step.logits, math.nan).flatten(1)
    return draw(step._replace(logits=logits), block_stats, unfiltered, config, records)


def check(step: SampleInputs, sums: bool = True, config: Config = SMALL) -> SampleResult:
    """The oracle's, and what both launches make."""
    drawn = agrees(draw_filtered(step, sums, config=config), step)
    both = run(step, config)
    assert torch.equal(drawn.ids, both.ids)
    deferred = may_be_deferred(step)
    if deferred.any():
        without = draw_filtered(step, sums, config=config, deferred=deferred)
        assert torch.equal(without.ids, drawn.ids)
        assert drawn.values is None or torch.equal(without.values.nan_to_num(7.0), drawn.values.nan_to_num(7.0))
    return drawn


def may_be_deferred(step: SampleInputs) -> Tensor:
    """(B,) bool: rows with a top-k that are not greedy, and whose temperature is no infinity's. Of one draw."""
    temperature = step.rows().temperature
    top_k = torch.as_tensor(step.params.top_k, device=DEVICE).expand(temperature.shape)
    is_ordinary = (temperature >= logit_transforms.GREEDY_BELOW) & (temperature < 2.0**100)
    return (top_k > 0) & (top_k < step.vocab_size) & is_ordinary & (step.num_samples == 1)


def mixed(params: SamplingParams, num_samples: int = 1) -> SampleInputs:
    """Ordinary rows at several temperatures, NaN, infinities, equal logits, two values and few of them, next to equal
    ones."""
    temperature = torch.rand(13) * 1.5 + 0.2
    temperature[11] = 0.0
    step = make_step(batch=13, vocab=VOCAB, params=params, num_samples=num_samples, temperature=temperature)
    logits = step.hidden_states.clone()
    logits[1, 77] = math.nan
    logits[2, [50, 290]] = INF
    logits[3] = -INF
    logits[4] = INF
    logits[5] = -INF
    logits[5, 290] = 3.0
    logits[6] = 0.0
    logits[6, 5] = -0.0
    logits[7] = torch.where(logits[7] > 0.0, 1.5, 1.0)
    logits[8] = logits[8].round()
    logits[9] = logits[9] * 0.003
    logits[10, 5:] = -INF
    logits[12] = 2.0
    logits[12, VOCAB - 1] = 1.0
    return with_logits(step, logits)


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("params", "sums"),
    [
        (SamplingParams(), False),
        (SamplingParams(top_k=7), False),
        (SamplingParams(top_k=300), False),
        (SamplingParams(top_p=0.9), True),
        (SamplingParams(top_p=1 - 1e-6), True),
        (SamplingParams(min_p=0.05), False),
        (SamplingParams(top_k=40, top_p=0.8, min_p=0.02), True),
        (SamplingParams(top_k=40, top_p=0.3, joint_top_p=1), True),
        (SamplingParams(top_k=8, top_p=0.8, min_p=0.02, joint_top_p=1, logprobs=True), True),
        (SamplingParams(top_p=0.7, logprobs=True, top_logprobs=3, logsumexp=True), True),
        (SamplingParams(logprobs=True), True),
    ],
)
def test_mixed_rows(params, sums):
    check(mixed(params, num_samples=2 if params.logprobs else 1), sums)


def test_ranks_of_the_least_likely():
    """Whose list of blocks is the whole row's, many times as long as what is read of it at once."""
    step = make_step(batch=3, vocab=4101, params=SamplingParams(logprobs=True))
    step = with_logits(step, step.hidden_states)
    order = step.logits.argsort(dim=1, descending=True)
    assert len(step.logits.unique()) == step.logits.numel()
    places = torch.tensor([4100, 4099, 2000], device=DEVICE)
    drawn = order.gather(1, places[:, None]).flatten()
    result = draw(step, block_stats_of(step), drawn, SMALL)
    where = layout(3, 1, step.params).ids["ranks"]
    assert result.ids[where.first : where.first + 3].tolist() == (places + 1).tolist()


@pytest.mark.quick(2)
@pytest.mark.parametrize("top_k", [1, 3, 60, min(VOCAB - 1, 512)])
@pytest.mark.parametrize(
    "more", [{}, {"top_p": 0.5, "min_p": 0.1}, {"top_p": 0.9, "logprobs": True, "top_logprobs": 2}]
)
def test_infinite_rows(top_k, more):
    """Undefined without a finite logit, which a block beside an infinite one may have, or the last token alone."""
    step = make_step(batch=8, vocab=VOCAB, params=SamplingParams(top_k=top_k, **more))
    logits = step.hidden_states.clone()
    logits[0, [5, 6, 300]] = INF
    logits[1], logits[1, 40] = -INF, INF
    logits[2] = INF
    logits[3], logits[3, 7], logits[3, 6] = -INF, INF, 1.0  # of one block
    logits[4], logits[4, VOCAB - 1] = INF, -3e38
    logits[5], logits[5, 11] = INF, math.nan
    logits[6], logits[6, ::2] = INF, -INF
    logits[7], logits[7, 0] = -INF, 2.0
    assert may_be_deferred(step).all()
    step = with_logits(step, logits)
    ids = check(step).ids[:8].tolist()
    if not step.params.logprobs:
        check_cutoffs(step, share=0.0)
    assert ids == [5, -1, -1, 7, 0, -1, -1, 0]


FILTERS = "top_k", "top_p", "joint_top_p", "min_p", "epsilon_cutoff", "top_n_sigma"


@pytest.mark.quick(4)
@pytest.mark.parametrize("part", range(8))
def test_mixes(part):
    """Of filters at the ends of their ranges, of other numbers in each row."""
    for seed in range(part, 8 if CUDA else 48, 8):
        mix = Mix(seed, device=DEVICE)
        mix.wanted = [name for name in FILTERS if mix.one_in(2)]
        step = mix.make(vocab=mix.random.choice((1, 31, 128, 129, VOCAB)))
        step = with_logits(step, step.hidden_states[:, : step.vocab_size])
        check(step)
        if not {"epsilon_cutoff", "top_n_sigma"} & set(mix.wanted):
            check_cutoffs(step, share=0.0, lowered=True)


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    "params",
    [SamplingParams(top_k=2), SamplingParams(top_k=3, top_p=0.7), SamplingParams(logprobs=True, top_logprobs=3)],
)
def test_the_lowest_ids_of_ties_are_not_always_in_the_first_chunks(params):
    """A block is 16 tokens of 128 and the 16 that are 64 above them. Every column of blocks has the highest logit
    once."""
    torch.manual_seed(0)
    step = make_step(batch=8, vocab=VOCAB, params=params, num_samples=6, temperature=1.0)
    logits = torch.full_like(step.hidden_states, -1.0)
    block = torch.arange(SMALL.width if SMALL.width <= VOCAB // 32 else VOCAB // 32 // 4 * 4)
    for row in range(8):
        ids = block // 4 * 128 + block % 4 * 16 + torch.randint(16, block.shape) + torch.randint(2, block.shape) * 64
        logits[row, ids] = 1.0
    check(with_logits(step, logits))


@pytest.mark.quick(1)
@pytest.mark.parametrize("room", [{}, {"many": 1}, {"many": 1, "capacity": 32}], ids=["", "guessed", "row"])
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(top_p=0.02),
        SamplingParams(top_p=0.4),
        SamplingParams(top_p=0.7),
        SamplingParams(top_k=2),
        SamplingParams(top_k=90),
        SamplingParams(min_p=0.6),
        SamplingParams(min_p=1.5),
        SamplingParams(top_p=0.4, min_p=0.3),
        SamplingParams(top_p=0.6, min_p=0.01),
        SamplingParams(top_k=60, min_p=0.5),
        SamplingParams(top_k=1, top_p=0.5),
        SamplingParams(top_k=60, top_p=0.6),
        SamplingParams(top_k=2, top_p=0.95),
        SamplingParams(top_k=60, top_p=0.1, joint_top_p=1),
        SamplingParams(top_k=12, top_p=0.6, joint_top_p=1),
    ],
)
def test_tokens_that_are_refused(params, room):
    """Flat rows with ties, where hardly any token that is drawn without filters is kept, once or several times; a
    peaked one and some whose highest logit several tokens have, where many are. Of candidates before the token that
    is drawn without filters, of more of them, of the row."""
    rows = 20 if CUDA else 10
    step = make_step(batch=rows, vocab=VOCAB, params=params, num_samples=1, temperature=torch.rand(rows) + 0.5, std=0.5)
    logits = (step.hidden_states * 8).round() / 8
    logits[0, 300] = 12.0
    logits[1 : rows // 2 + 2, [7, 70, 207, 300]] = 12.0
    step = with_logits(step, logits)
    drawn = check(step, config=replace(SMALL, **room))
    assert (drawn.ids != oracle.run(step._replace(params=DEFAULT_PARAMS)).ids).sum() >= 3


@pytest.mark.skipif(CUDA, reason="looks into the interpreter")
@pytest.mark.parametrize("vocab", [384, 385, 417, 432, 433])
@pytest.mark.parametrize("room", [{}, {"width": 16}, {"width": 16, "capacity": 512}])
def test_equal_rows_are_known_where_the_last_blocks_hold_no_token(vocab, room, monkeypatch):
    """Of such a row nothing is searched, which would take several passes over it: a row that is read, with a block in
    each column or several, or gathered."""

    def search(*_):
        raise AssertionError("the row is searched")

    monkeypatch.setattr(filtered_sample_kernel, "find_limit", search)
    check(make_step(batch=1, vocab=vocab, params=SamplingParams(top_p=0.9), std=0.0), config=replace(SMALL, **room))


@pytest.mark.skipif(CUDA, reason="looks into the interpreter")
def test_a_large_top_k_reads_its_candidates_alone(monkeypatch):
    """Not the row, which takes ten times as long: more tokens have the highest logits than columns of blocks."""
    whole = []

    def search(tokens, *rest):
        whole.append(int(tokens.whole.handle.data.item()))
        return find_limit(tokens, *rest)

    monkeypatch.setattr(filtered_sample_kernel, "find_limit", search)
    step = make_step(batch=1, vocab=40000, params=SamplingParams(top_k=1000))
    check(step, config=replace(CONFIG, capacity=3000))
    assert set(whole) == {0}


def test_a_row_is_the_same_in_any_batch():
    step = mixed(SamplingParams(top_p=0.8, logprobs=True))
    whole = draw_filtered(step)
    for first, last in ((7, 10), (2, 3)):
        part = step.part(first, last)
        assert_same_rows(draw_filtered(part), part, whole, step, slice(first, last))


def test_more_capacity_gives_the_same_tokens():
    """Some candidates, the row itself, and more candidates."""
    step = make_step(batch=2, vocab=VOCAB, params=SamplingParams(top_k=100, top_p=0.9), num_samples=4)
    shapes = [SMALL, replace(SMALL, capacity=32), replace(SMALL, capacity=8192)]
    tokens = [run(step, shape).ids for shape in shapes]
    assert torch.equal(tokens[0], tokens[1])
    assert torch.equal(tokens[0], tokens[2])


HOT = (1.0, 1e35, 1e36, 1e37, 1e38, 3e38, INF)


@pytest.mark.quick(3)
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(top_p=0.5, logprobs=True),
        SamplingParams(top_p=0.0),
        SamplingParams(min_p=0.3, logprobs=True),
        SamplingParams(top_k=151, top_p=0.7, logprobs=True),
        SamplingParams(logprobs=True),
    ],
)
def test_masses_at_the_largest_temperatures(params):
    """Temperatures and logits up to the largest float, and logits that are further apart than that; the last rows also
    have infinite ones, but for the endless temperature, at which they leave no token."""
    logits = (torch.rand(2 * len(HOT) - 1, VOCAB) * 2 - 1) * 3.3e38
    logits[len(HOT) :, [7, VOCAB - 1]] = INF
    logits[len(HOT) :, 9] = torch.finfo(torch.float32).max
    step = make_step(batch=len(logits), vocab=VOCAB, params=params, temperature=torch.tensor(HOT + HOT[:-1]))
    check(with_logits(step, logits.to(DEVICE)))


def kept_by(step: SampleInputs, records: Records) -> Tensor:
    """(B, V) bool, as ``rejection`` reads a record, but for the least mass."""
    assert step.logits is not None
    token = torch.arange(step.vocab_size, device=DEVICE)
    return (key_of(step.logits).long() << 31 | token ^ 0x7FFFFFFF) >= records.limits[:, None]


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    "params", [DEFAULT_PARAMS, SamplingParams(min_p=0.05), SamplingParams(top_k=40, top_p=0.8, min_p=0.02)]
)
def test_records_are_those_of_both_launches(params):
    """What rejection reads of a row: which tokens are kept, and their mass; of rows of any kind, greedy ones too."""
    step = mixed(params)
    assert step.logits is not None
    ours, theirs = (empty_records(13, DEVICE) for _ in range(2))
    assert torch.equal(draw_filtered(step, records=ours).ids, run(step, SMALL, theirs).ids)
    (least, mass, *rest), (least_of, mass_of, *rest_of) = (records.masses.T for records in (ours, theirs))
    defined = ~mass_of.isnan()
    assert defined.tolist() == (~mass.isnan()).tolist() == [row not in (1, 3, 4) for row in range(13)]
    torch.testing.assert_close(mass[defined], mass_of[defined], rtol=1e-5, atol=0)
    pairs = [(kept_by(step, ours), kept_by(step, theirs)), (least, least_of)]
    pairs += [
        (a.view(torch.int32), b.view(torch.int32)) for a, b in zip(rest, rest_of)
    ]  # the highest logit, a greedy token
    for a, b in pairs:
        assert torch.equal(a[defined], b[defined])
    assert int(rest[1].view(torch.int32)[11]) == int(step.logits[11].argmax())


def cutoffs_of(step: SampleInputs, deferred: Tensor | bool = False) -> Tensor:
    """The highest that rows may have."""
    keys, rows, params = block_stats_of(step).keys, step.rows(), step.params
    batch, blocks = keys.shape
    top_k, top_p, min_p = (
        torch.as_tensor(x, device=DEVICE).expand(batch) for x in (params.top_k, params.top_p, params.min_p)
    )
    ranked = torch.cat([keys.sort(descending=True).values, torch.full_like(keys[:, :1], -(2**31))], dim=1)
    by_top_k = ranked.gather(1, (top_k.long() - 1).clamp(0, blocks)[:, None])[:, 0]
    bits = ranked[:, 0]
    top = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).view(torch.float32)
    scale = (math.log2(math.e) / rows.temperature).clamp(min=2.0**-149)
    kept = top + (min_p.clamp(max=1.0).log2() - 0.01) / scale - top.abs().clamp(max=3.4028234663852886e38) * 1e-6
    cutoffs = torch.where(min_p > 0, key_of(kept.float()), -(2**31))
    cutoffs = torch.where((top_k > 0) & (top_k < step.vocab_size), by_top_k, cutoffs)
    unread = (top_k <= 0) | (top_k >= step.vocab_size)
    unread = (unread & ~(top_p < 1) & ~(min_p > 0)) | top_p.isnan() | min_p.isnan()
    unread |= top.isnan() | (top.isinf() & ~((top == INF) & torch.as_tensor(deferred, device=DEVICE)))
    unread |= ~(rows.temperature >= logit_transforms.GREEDY_BELOW)
    return torch.where(unread, 0x7FFFFFFF, cutoffs).int()


def check_cutoffs(
    step: SampleInputs, config: Config = SMALL, share: float = 0.2, lowered: bool = False
) -> SampleResult:
    """The same tokens with cutoffs; so many blocks at least are not stored."""
    drawn, cutoffs = draw_filtered(step, config=config), cutoffs_of(step)
    lower = block_stats_of(step).keys < cutoffs[:, None]
    assert lower.float().mean() >= share
    assert torch.equal(draw_filtered(step, cutoffs=cutoffs, config=config).ids, drawn.ids)
    deferred = may_be_deferred(step)
    if deferred.any():
        some = cutoffs_of(step, deferred)
        assert torch.equal(draw_filtered(step, cutoffs=some, config=config, deferred=deferred).ids, drawn.ids)
    if lowered:
        cutoffs = (cutoffs.long() - torch.randint(1, 2**23, cutoffs.shape).to(DEVICE)).clamp(min=-(2**31)).int()
        assert torch.equal(draw_filtered(step, cutoffs=cutoffs, config=config).ids, drawn.ids)
    return drawn


ROOMY = SMALL if CUDA else replace(SMALL, capacity=512)  # candidates below a cutoff would fit


@pytest.mark.quick(3)
@pytest.mark.parametrize(
    ("params", "share"),
    [
        (SamplingParams(top_k=1), 0.6),
        (SamplingParams(top_k=7, top_p=0.8, min_p=0.02), 0.4),
        (SamplingParams(top_k=300), 0.5 if CUDA else 0.2),
        (SamplingParams(min_p=0.05), 0.3),
        (SamplingParams(min_p=1.0), 0.5),
        (SamplingParams(top_p=0.8, min_p=1e-3), 0.3),
        (SamplingParams(top_k=60, top_p=0.9, joint_top_p=1), 0.2),
    ],
)
def test_cutoffs_of_mixed_rows(params, share):
    check_cutoffs(mixed(params), ROOMY, share)


MEDIUM = SMALL if CUDA else replace(SMALL, width=64, gathered=16, tile=256)


def is_dense(params: SamplingParams) -> SampleInputs:
    """What is drawn from is few tokens, some more, and more than there is room for: ties in blocks that have others
    too, and in blocks of their own, below one higher logit, nearly equal logits. Tokens without filters are in other
    blocks for the most part."""
    vocab = 151_936 if CUDA else 2_571
    step = make_step(batch=6, vocab=vocab, params=params, num_samples=2, temperature=1.0)
    logits = step.hidden_states.clone()
    token = torch.arange(vocab, device=DEVICE)
    block = token // 128 * 4 + token // 16 % 4
    high = block * 7 % 12 < 8
    logits[1] = logits[1].round()
    ties, some = 1.0 + (token % 16 < 1) * 0.5, 1.0 + (token % 16 < 8) * 0.5
    for row, values in ((2, ties), (3, some), (4, 1.0 + torch.rand(vocab, device=DEVICE) * 0.05)):
        logits[row] = torch.where(high, values, values.clone().fill_(0.9) if row == 4 else 0.25)
    logits[5] = torch.where(high, 1.5, 0.5)
    logits[2:4, vocab // 2] = 2.5
    return with_logits(step, logits)


@pytest.mark.parametrize(
    ("params", "share"),
    [
        (SamplingParams(top_k=50), 0.3),
        (SamplingParams(top_k=50, top_p=0.8, min_p=0.01), 0.3),
        (SamplingParams(min_p=0.93), 0.3),
    ],
)
def test_cutoffs_of_crowded_rows(params, share):
    step = is_dense(params)
    agrees(check_cutoffs(step, MEDIUM, share), step)
