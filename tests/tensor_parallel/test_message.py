"""Headers of messages: what ranks compare, and the hashes in them."""

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from flashsampling.inputs import DraftChains, SampleInputs
from flashsampling.sampling_params import DEFAULT_PARAMS, SamplingParams
from flashsampling.speculative.drafts import DraftBatch, _odd_number
from flashsampling.tensor_parallel.message import (
    FAILED,
    FIRST_PARAM,
    HEADER,
    OFFSET,
    SEED,
    TEMPERATURE,
    Hashes,
    difference,
)
from tests.problems import rows_only
from tests.tensor_parallel.test_filters import USUAL, flat

HASHES = Hashes(16, torch.device("cpu"))


def header(step: SampleInputs) -> list[int]:
    """Words that a step's parameters have in a message."""
    words = torch.zeros(HEADER + 2, dtype=torch.int64)
    HASHES.write(words, step)
    return words[:HEADER].tolist()


def params_header(params: SamplingParams) -> list[int]:
    return header(flat(5, 70, params))


def assert_named(headers: list[list[int]], names: tuple[str, ...]) -> None:
    """The last header differs from the first in what has these names, and from all others."""
    failure = difference([headers[0], headers[-1], headers[0]])
    assert failure is not None
    assert (failure.rank, failure.differs) == (1, names)
    assert headers[-1] not in headers[:-1]


def sent(step=7, batch=2, num_samples=1, temperature=11, seed=12, offset=13, failed=0):
    return [step, batch, num_samples, temperature, seed, offset, failed] + [0] * (HEADER - FIRST_PARAM)


@pytest.mark.parametrize(
    ("headers", "rank", "differs", "what"),
    [
        ([sent(), sent(seed=1)], 1, ("seed",), "rank 0"),
        ([sent(), sent(offset=1, temperature=2)], 1, ("offset", "temperature"), "rank 0"),
        ([sent(step=8), sent(), sent()], 0, ("step",), "rank 1"),  # most are right
        ([sent(), sent(step=8, seed=2), sent()], 1, ("step", "seed"), "rank 0"),
        ([sent(), sent(batch=6, seed=1)], 1, ("batch size or num_samples",), "rank 0"),
        ([sent(), sent(num_samples=3, seed=1)], 1, ("batch size or num_samples",), "rank 0"),
        ([sent(batch=6), sent(num_samples=3), sent(num_samples=3)], 0, ("batch size or num_samples",), "rank 1"),
        ([sent(), sent(failed=1, step=3)], 1, (), "the group has failed there"),
    ],
)
def test_whose_header_differs_and_in_what(headers, rank, differs, what):
    failure = difference(headers)
    kind = "mismatch" if differs else "aborted"
    assert (failure.kind, failure.rank, failure.differs, failure.what) == (kind, rank, differs, what)
    assert difference([headers[0]] * 4) is None


@pytest.mark.parametrize("field", [TEMPERATURE, SEED, OFFSET])
def test_every_bit_of_every_row_is_in_the_hash(field):
    generator = torch.Generator().manual_seed(1)
    seed, offset = (torch.randint(-(2**63), 2**63 - 1, (9,), generator=generator) for _ in range(2))
    parameters = {TEMPERATURE: torch.rand(9, generator=generator), SEED: seed, OFFSET: offset}
    usual = header(rows_only(9, *parameters.values()))
    seen = {usual[field]}
    bits = parameters[field].view(torch.int32) if field == TEMPERATURE else parameters[field]
    for row, bit in itertools.product(range(9), range(32 if field == TEMPERATURE else 64)):
        changed = bits.clone()
        changed[row] ^= (1 << bit) - (1 << (bits.itemsize * 8) if bit == bits.itemsize * 8 - 1 else 0)
        other = header(rows_only(9, *(parameters | {field: changed.view(parameters[field].dtype)}).values()))
        assert [other[i] == usual[i] for i in range(HEADER)] == [i != field for i in range(HEADER)], (row, bit)
        seen.add(other[field])
    swapped = parameters | {field: parameters[field].flip(0)}
    seen.add(header(rows_only(9, *swapped.values()))[field])
    assert len(seen) == 2 + 9 * (32 if field == TEMPERATURE else 64)


@pytest.mark.parametrize(
    ("temperature", "seed", "offset"), [(0.7, 2**63 - 1, -(2**63)), (0.0, -1, 5), (3e38, 0, 2**62), (-0.0, 0, 0)]
)
@pytest.mark.parametrize("batch", [1, 5, 8])
def test_a_number_is_that_number_in_every_row(temperature, seed, offset, batch):
    numbers = header(rows_only(batch, temperature, seed, offset, 3))
    filled = [torch.full((batch,), number) for number in (temperature, seed, offset)]
    assert header(rows_only(batch, *filled, 3)) == numbers
    assert numbers[FAILED] == 0
    if temperature == 0:
        for zero in (-temperature, -filled[0]):
            assert header(rows_only(batch, zero, *filled[1:], 3)) == numbers


# -- sampling parameters


@pytest.mark.parametrize("name", USUAL)
def test_what_differs_has_its_name(name):
    """Left out, changed in a single place, and a list that is longer by a zero: ranks would send other shapes."""
    usual, value = SamplingParams(**USUAL), USUAL[name]
    others: list[Any] = [getattr(DEFAULT_PARAMS, name)]
    if isinstance(value, Tensor):
        for place in (0, 1, value.numel() - 1):
            changed = value.clone()
            changed.view(-1)[place] += 2.0**-20 if value.is_floating_point() else 1
            others.append(changed)
        if name in ("bias_ids", "bias_values", "logprob_ids"):
            others.append(torch.nn.functional.pad(value, (0, 1)))
    elif not isinstance(value, bool):
        others.append(value + 1)
    public = {"logprobs": "return_logprobs", "logsumexp": "return_logsumexp"}
    public |= dict.fromkeys(("dense_bias", "bias_ids", "bias_values"), "logit_bias")
    headers = [params_header(usual)]
    for other in others:
        headers.append(params_header(usual._replace(**{name: other})))
        assert_named(headers, (public.get(name, name),))


def test_what_does_not_differ():
    """Numbers for values of all rows, bits and columns that are no token's, memory in another order."""
    usual = SamplingParams(**USUAL)
    wide = torch.cat([USUAL["token_mask"], torch.ones(5, 2, dtype=torch.int32)], dim=1)
    wide[:, 2] ^= 1 << 6  # token 70
    for name, values in (
        ("min_p", torch.full((5,), 0.5)),
        ("frequency_penalty", torch.full((5,), 0.25)),
        ("token_mask", wide),
        ("dense_bias", torch.cat([USUAL["dense_bias"], torch.ones(3)])),
        ("bias_ids", USUAL["bias_ids"].T.contiguous().T),
    ):
        assert params_header(usual._replace(**{name: values})) == params_header(usual), name
    for params, same in (
        ({"top_k": 900}, {"top_k": torch.full((5,), 900)}),
        ({"top_k": 900}, {"top_k": torch.full((5,), 900, dtype=torch.int32)}),
        ({"top_k": 9}, {"top_k": torch.full((5,), 9)}),
        ({"presence_penalty": -torch.zeros(5)}, {"presence_penalty": torch.zeros(5)}),
    ):
        assert params_header(SamplingParams(**params)) == params_header(SamplingParams(**same)), params
    given = [
        params_header(SamplingParams(counts=counts, bias=torch.randn(9)))
        for counts in torch.ones(2, 5, 70, dtype=torch.int32)
    ]
    assert given[0] == given[1] != params_header(DEFAULT_PARAMS)  # a rank reads its shard's


def test_shards_of_a_vocabulary_wider_than_the_hash_s_factors():
    """Every word counts, wherever it stands."""
    mask = torch.zeros(1, 20_000, dtype=torch.int32)
    seen = set()
    for place in (None, 0, 8191, 8192, 16_384, 19_999):
        words = mask.clone()
        if place is not None:
            words[0, place] = 1
        step = flat(1, 640_000, SamplingParams(token_mask=words))
        seen.add(int(HASHES.of_request(step)))
    assert len(seen) == 6


# -- drafts


def test_drafts_that_differ_have_their_name():
    """A difference in one entry is named; entries that belong to no draft do not count."""

    def drafts_header(drafted: DraftChains | None) -> list[int]:
        return header(flat(11, 70, DEFAULT_PARAMS, drafted=drafted))

    ids = torch.tensor([[5, 6], [7, -1], [-1, -1], [1, 2]])
    rows = torch.tensor([[0, 1, 2], [3, 4, 5], [5, 6, 7], [6, 7, 8]])
    places = torch.tensor([[0, 1], [2, 5], [5, 6], [3, 4]])
    q = torch.rand(7, 73, generator=torch.Generator().manual_seed(0))
    usual = DraftChains(ids, rows, places, q)
    others: list[tuple[DraftChains | None, tuple[str, ...]]] = [
        (None, ("method", "draft_token_ids", "cu_draft_lengths", "draft_probs")),
        (usual._replace(probs=None), ("draft_probs",)),
        (usual._replace(token_ids=ids.masked_fill(ids == 6, 8)), ("draft_token_ids",)),
        (usual._replace(rows=rows + torch.tensor([[0], [0], [1], [0]])), ("cu_draft_lengths",)),
    ]
    for place, column in ((0, 0), (1, 69), (2, 31), (3, 1), (4, 0)):
        other = q.clone()
        other[place, column] += 2.0**-20
        others.append((usual._replace(probs=other), ("draft_probs",)))
    headers = [drafts_header(usual)]
    for drafted, differs in others:
        headers.append(drafts_header(drafted))
        assert_named(headers, differs)
    certain = usual._replace(probs=None)
    one_more = certain._replace(token_ids=torch.nn.functional.pad(ids, (0, 1)))  # a draft more: 0
    assert drafts_header(one_more) != drafts_header(certain)
    wide = q.clone()
    wide[5:], wide[:, 70:] = math.nan, -1.0
    assert drafts_header(usual._replace(probs=wide)) == headers[0]
    for dtype in (torch.bfloat16, torch.float16):
        narrow, other = q.to(dtype), q.to(dtype)
        other[3, 69] += 0.25
        a, b = (drafts_header(usual._replace(probs=probs)) for probs in (narrow, other))
        assert a == drafts_header(usual._replace(probs=narrow.T.contiguous().T)) != b


def test_a_header_is_plain_again():
    """Whatever stood there before; and a draft hash is the word of the drafts."""
    words = torch.zeros(HEADER, dtype=torch.int64)
    ids, rows = torch.zeros(4, 2).long(), torch.zeros(4, 3).long()
    drafted = flat(11, 70, DEFAULT_PARAMS, drafted=DraftChains(ids, rows, ids, None))
    for step in (flat(5, 70, SamplingParams(**USUAL)), flat(5, 70, SamplingParams(top_k=9)), drafted):
        HASHES.write(words, step)
        assert words[FIRST_PARAM:].any()
        assert words.tolist() == header(step)
    HASHES.clear(words)
    HASHES.write(words, flat(5, 70, DEFAULT_PARAMS))
    assert words.tolist() == header(flat(5, 70, DEFAULT_PARAMS))
    assert not words[FIRST_PARAM:].any()
    for params in (DEFAULT_PARAMS, SamplingParams(top_k=5)):
        headers = [header(flat(11, 70, params, draft_hash=torch.tensor(draft_hash))) for draft_hash in (5, 6)]
        assert_named(headers, ("draft_token_ids",))


def _hash(ids: Any, parents: Any = None, bounds: Any = None, n: int | None = None) -> int:
    ids, parents, bounds = (None if given is None else torch.tensor(given) for given in (ids, parents, bounds))
    batch = len(ids) if bounds is None else len(bounds) - 1
    return int(DraftBatch(ids, parents, bounds, batch, ids.shape[1] if n is None else n).drafts().hash())


def test_drafts_that_differ_have_another_hash():
    """All chains of up to two drafts of two requests with ids from 0 to 4, and all trees of three drafts of two ids: a
    sum that weighs a place by its number takes many of these for the same."""
    of_one = [[-1, -1], *([first, second] for first in range(5) for second in range(-1, 5))]
    assert len({_hash([one, other]) for one in of_one for other in of_one}) == len(of_one) ** 2
    parents = [[-1, one, other] for one in (-1, 0) for other in (-1, 0, 1)]
    ids = list(itertools.product((0, 1), repeat=3))
    assert (
        len({_hash([some], [before]) for some in ids for before in parents} | {_hash([some]) for some in ids}) == 8 * 7
    )
    assert _hash([[7, 8]], [[-1, 1]]) != _hash([[7, 8]], [[-1, -1]])  # a parent that is not before it, and none
    traded = ([[9], [9], [one], [9], [two], [9], [two], [9], [one]] for one, two in ((5, 6), (6, 5)))
    assert len(set(map(_hash, traded))) == 2  # places equally far apart


def test_what_belongs_to_no_draft_has_no_hash():
    drafts = [[5, 6, 7], [7, -1, -1], [-1, -1, -1], [1, 2, -1]]
    expected = _hash(drafts)
    assert _hash([[5, 6, 7], [7, -5, 9], [-1, 4, -1], [1, 2, -9]]) == expected
    rooms = [5, 6, 7, 7, -1, 0, -1, 0, 0, 1, 2, -1]
    assert _hash(rooms, bounds=[0, 3, 6, 9, 12], n=3) == expected
    assert _hash([*rooms, 99], bounds=[0, 3, 6, 9, 12], n=3) == expected  # behind the last one's
    parents = [[-1, 0, 1], [-1, 0, 1], [-1, 0, 1], [-1, 0, 1]]
    others = [[-1, 0, 1], [-1, 7, -9], [5, 6, 7], [-1, 0, -1]]
    assert _hash(drafts, parents) == _hash(drafts, others) != expected


def test_room_for_drafts_is_part_of_their_hash():
    """It says which row of hidden states is whose, and how wide the output is; and no hash is that of no drafts at all,
    0."""
    kinds: list[Any] = [([[-1] * n] * batch, None, n) for batch in range(1, 5) for n in range(1, 5)]
    ragged = [bounds for bounds in itertools.product(range(4), repeat=3) if sorted(bounds) == list(bounds)]
    kinds += [([-1] * 4, [0, *bounds], 7) for bounds in ragged]
    kinds += [([-1] * 4, [0, *ragged[0]], 8)]
    hashes = {_hash(ids, bounds=bounds, n=n) for ids, bounds, n in kinds}
    assert len(hashes) == len(kinds)
    assert 0 not in hashes


def test_ids_that_no_token_has():
    """Twice 2**62 more is nothing where two places' weights add up to a multiple of four; none of these is ever
    accepted."""
    numbers = _odd_number(torch.tensor([0, 1, 1 << 32, 1 << 32 | 1])).tolist()
    first, second = next(pair for pair in itertools.combinations(range(4), 2) if sum(numbers[i] for i in pair) % 4 == 0)
    drafts, others = [5, 6, 7, 8], [5, 6, 7, 8]
    for place in first, second:
        others[place] += 2**62
    assert _hash([drafts[:2], drafts[2:]]) != _hash([others[:2], others[2:]])
    ids = [[2**31 - 1, 3]], [[2**31, 3]], [[2**63 - 1, 3]]
    assert len(set(map(_hash, ids))) == 1
    assert _hash([[2**31 - 2, 3]]) != _hash(ids[0])
