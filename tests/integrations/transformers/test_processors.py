"""Mapping a GenerationConfig and logits processors: transformers' result for the same logits, or an error by name."""

import copy
import inspect
import math
import random

import pytest
import torch

transformers = pytest.importorskip("transformers")

from transformers.generation import logits_process as of_transformers  # noqa: E402
from transformers.generation.logits_process import (  # noqa: E402
    EpsilonLogitsWarper,
    ForcedBOSTokenLogitsProcessor,
    ForcedEOSTokenLogitsProcessor,
    LogitNormalization,
    LogitsProcessorList,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from flashsampling.integrations.transformers.processor_params import StepParams  # noqa: E402
from flashsampling.integrations.transformers.processors import (  # noqa: E402
    _KINDS,
    read_processors,
)
from flashsampling.param_parsers import BatchShape  # noqa: E402
from flashsampling.reference import logit_transforms  # noqa: E402
from flashsampling.sampling_params import parse_sampling_params  # noqa: E402
from tests.conftest import DEVICE  # noqa: E402

VOCAB, BATCH, LENGTH = 45, 4, 12  # not a multiple of 32; few tokens, so that prefixes match and n-grams repeat


def ids(random: random.Random, most: int = 6) -> list[int]:
    return random.sample(range(VOCAB), random.randint(1, most))


def sequences(random: random.Random) -> list[tuple[int, ...]]:
    return [tuple(random.choices(range(5), k=random.choice((1, 1, 2, 3)))) for _ in range(random.randint(1, 12))]


try:  # a length per row, in newer releases of transformers
    BY_ROW = [torch.tensor([0, 3, 9, LENGTH + 2])]
    RepetitionPenaltyLogitsProcessor(2.0, BY_ROW[0])
except ValueError:
    BY_ROW = []
# as transformers orders what a configuration asks for
MAKE = {
    SequenceBiasLogitsProcessor: lambda random: [
        {words: random.choice((-3.0, 5.0, -100.0, -math.inf)) for words in sequences(random)}
    ],
    RepetitionPenaltyLogitsProcessor: lambda random: [
        random.choice((0.5, 1.0, 1.3, 20.0)),
        random.choice((None, 0, 3, LENGTH, LENGTH + 1, *BY_ROW)),
    ],
    NoRepeatNGramLogitsProcessor: lambda random: [random.choice((1, 2, 3, LENGTH + 2, LENGTH + 3))],
    NoBadWordsLogitsProcessor: lambda random: [list(map(list, sequences(random))), random.choice((None, 3, [3, 4]))],
    MinLengthLogitsProcessor: lambda random: [random.choice((0, LENGTH, LENGTH + 1, LENGTH + 2, 99)), ids(random)],
    MinNewTokensLengthLogitsProcessor: lambda random: [LENGTH, random.choice((0, 1, 2, 9)), ids(random)],
    ForcedBOSTokenLogitsProcessor: lambda random: [random.randrange(5)],
    ForcedEOSTokenLogitsProcessor: lambda random: [random.choice((LENGTH + 1, LENGTH + 2, 99)), ids(random, 2)],
    SuppressTokensLogitsProcessor: lambda random: [[*ids(random), 999]],
    SuppressTokensAtBeginLogitsProcessor: lambda random: [ids(random), random.choice((LENGTH, LENGTH + 1))],
    TemperatureLogitsWarper: lambda random: [random.choice((0.3, 0.7, 1.0, 1.5, 4.0))],
    TopKLogitsWarper: lambda random: [random.choice((1, 2, 7, VOCAB - 1, VOCAB, 1000))],
    TopPLogitsWarper: lambda random: [random.choice((0.0, 0.1, 0.5, 0.9, 0.999))],
    MinPLogitsWarper: lambda random: [random.choice((0.0, 0.01, 0.2, 1.0))],
    EpsilonLogitsWarper: lambda random: [random.choice((1e-4, 0.01, 0.07, 0.9))],
    LogitNormalization: lambda random: [],
}


def processor_of(kind, rows: random.Random):
    where = {"device": DEVICE} if "device" in inspect.signature(kind).parameters else {}
    return kind(*MAKE[kind](rows), **where)


def processed(requests, temperature, input_ids, logits):
    """(B, V) as transformers would have them: over the temperature, -inf where a token is not kept."""
    problem = BatchShape(len(logits), VOCAB, VOCAB, logits.device, 1)
    params = parse_sampling_params(requests.at(input_ids), problem)
    temperatures = torch.full((len(logits),), temperature, device=logits.device)
    ours = logit_transforms.processed(logit_transforms.raw(logits, params), params)
    kept = logit_transforms.kept(ours, temperatures, **params.filter_values())
    return (ours / temperature).masked_fill(~kept, -math.inf).double()


def compare(chosen, rows: random.Random):
    """Two steps of this list on random logits: whether it was taken."""
    generator = torch.Generator().manual_seed(rows.randrange(2**31))
    chosen = LogitsProcessorList(chosen)
    try:
        params = read_processors(chosen, True)
    except ValueError:
        return False
    input_ids = torch.randint(0, 5, (BATCH, LENGTH), generator=generator).to(DEVICE)
    requests = StepParams(params, input_ids, VOCAB, DEVICE, {})
    for _ in range(3):
        logits = (4 * torch.randn(BATCH, VOCAB, generator=generator)).to(DEVICE)
        received = chosen(input_ids, logits.double())  # no mass is then a rounding away from p
        ours = processed(requests, params.temperature, input_ids, logits)
        for row in range(BATCH):
            lost = not received[row].isfinite().any()  # all masked out: -inf, and what their softmax makes of it
            assert lost == (not ours[row].isfinite().any()), "a row without a token"
            if lost:
                continue
            assert torch.equal(ours[row].isfinite(), received[row].isfinite()), list(map(type, chosen))
            kept = ours[row].isfinite()
            if kept.sum() == 1:
                continue  # a forced token's logit is 0 there
            both = (ours[row][kept].log_softmax(0), received[row][kept].log_softmax(0))
            assert torch.allclose(*both, atol=1e-4, rtol=1e-5), chosen
        drawn = torch.randint(0, 5, (BATCH,), generator=generator).to(DEVICE)
        requests.count(drawn, input_ids.shape[1])
        input_ids = torch.cat([input_ids, drawn[:, None]], dim=1)
    return True


def test_there_is_a_case_for_every_class_that_is_taken():
    assert set(MAKE) == set(_KINDS)


@pytest.mark.parametrize("kind", MAKE, ids=lambda kind: kind.__name__)
def test_every_class_alone(kind):
    rows = random.Random(kind.__name__)
    was_taken = [compare([processor_of(kind, rows)], rows) for _ in range(60)]
    assert sum(was_taken) > 20
    assert all(was_taken) or kind is ForcedEOSTokenLogitsProcessor  # of two tokens


@pytest.mark.quick(1)
@pytest.mark.parametrize("seed", range(5))
def test_any_configuration(seed):
    """Some processors of each, in the order in which transformers puts them: all are taken."""
    rows = random.Random(seed)
    for _ in range(120):
        chosen = [processor_of(kind, rows) for kind in MAKE if rows.random() < 0.3]
        two = any(type(one) is ForcedEOSTokenLogitsProcessor and len(one.eos_token_id) > 1 for one in chosen)
        assert compare(chosen, rows) != two


@pytest.mark.quick(1)
@pytest.mark.parametrize("seed", range(5))
def test_any_list(seed):
    """Processors in any order, some twice: accepted lists have the same result, and some are accepted."""
    rows = random.Random(seed)
    was_taken = 0
    for _ in range(300):
        chosen = [processor_of(kind, rows) for kind in rows.choices(list(MAKE), k=rows.randint(2, 4))]
        was_taken += compare(chosen, rows)
    assert 100 < was_taken < 240


ORDERS = {
    "top-p before the temperature": (
        [TopPLogitsWarper(0.9), TemperatureLogitsWarper(0.5)],
        "TemperatureLogitsWarper: it comes after TopPLogitsWarper, and this order is not",
    ),
    "two top-p": ([TopPLogitsWarper(0.9), TopPLogitsWarper(0.8)], "it comes after TopPLogitsWarper"),
    "a bias behind a penalty": (
        [RepetitionPenaltyLogitsProcessor(1.2), SequenceBiasLogitsProcessor({(3,): 1.0})],
        "SequenceBiasLogitsProcessor: it comes after RepetitionPenalty",
    ),
    "a mask behind a filter": (
        [TopKLogitsWarper(5), SuppressTokensLogitsProcessor([3])],
        "it comes after TopKLogitsWarper",
    ),
    "several forced": (
        [ForcedEOSTokenLogitsProcessor(9, [3, 4])],
        r"forced_eos_token_id=None\): one of the tokens \[3, 4\]",
    ),
    "another filter value": ([TopKLogitsWarper(5, filter_value=-1e4)], "filter_value=-10000.0 does not remove a token"),
    "tokens to keep": ([MinPLogitsWarper(0.5, min_tokens_to_keep=3)], "MinPLogitsWarper: min_tokens_to_keep=3"),
    "a subclass": ([type("Own", (TopKLogitsWarper,), {})(5)], "switch off Own, or keep it"),
    "an infinite bias": ([SequenceBiasLogitsProcessor({(3,): math.inf})], "a bias must be below infinity, got inf"),
}


@pytest.mark.parametrize("case", ORDERS)
def test_what_is_refused_and_why(case):
    chosen, message = ORDERS[case]
    with pytest.raises(ValueError, match=message):
        read_processors(chosen, True)


def test_every_other_processor_of_transformers_is_refused_by_name():
    others = {
        value
        for value in vars(of_transformers).values()
        if isinstance(value, type) and issubclass(value, of_transformers.LogitsProcessor)
    } - set(_KINDS)
    assert len(others) > 10
    for other in others:
        with pytest.raises(ValueError, match=f"switch off {other.__name__}"):
            read_processors([object.__new__(other)], True)


def test_a_top_k_that_keeps_no_fewer_may_come_late():
    """A later, larger top-k is accepted, as the default of 50 is behind the user's filters."""
    params = read_processors([TopKLogitsWarper(20), TopPLogitsWarper(0.9), TopKLogitsWarper(50)], True)
    assert params.options == {"top_k": 20, "top_p": 0.9}


def make(processors, given=None, batch=2, do_sample=True):
    prompt = torch.zeros(batch, 3, dtype=torch.int64, device=DEVICE)
    return StepParams(read_processors(processors, do_sample), prompt, VOCAB, DEVICE, given or {}), prompt


def test_nothing_asked_is_nothing_passed():
    requests, prompt = make([TemperatureLogitsWarper(0.5), LogitNormalization()])
    assert requests.at(prompt) == {}
    requests, prompt = make([TopKLogitsWarper(50), TopPLogitsWarper(0.9)], do_sample=False)
    assert requests.at(prompt) == {}  # greedy


def test_more_biases_than_a_row_takes_are_a_vector_of_float32():
    """Whatever torch's default dtype is."""
    words = SequenceBiasLogitsProcessor({(token % VOCAB, token // VOCAB): -1.0 for token in range(1025)})
    with pytest.raises(ValueError, match="must be at most 1024 where one is of several tokens, got 1025"):
        make([words])
    prompt = torch.zeros(1, 3, dtype=torch.int64, device=DEVICE)
    many = {(token,): float(token) for token in range(1025)}
    params = read_processors([SequenceBiasLogitsProcessor(many), SequenceBiasLogitsProcessor({(7,): 0.5})], True)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        bias = StepParams(params, prompt, 2000, DEVICE, {}).at(prompt)["logit_bias"]
    finally:
        torch.set_default_dtype(default)
    assert isinstance(bias, torch.Tensor)
    assert (bias.shape, bias.dtype) == ((2000,), torch.float32)
    assert bias[[7, 1023, 1025]].tolist() == [7.5, 1023.0, 0.0]


def test_texts_as_short_as_what_is_looked_for():
    """N-grams of all of a text, and biases behind all of it."""
    text = torch.tensor([[5, 5, 5], [6, 5, 5]], device=DEVICE)
    for size in (1, 2, 3):
        requests, _ = make([NoRepeatNGramLogitsProcessor(size)])
        short = text[:, :size]
        assert processed(requests, 1.0, short[:, 1:], torch.zeros(2, VOCAB, device=DEVICE)).isfinite().all()
        banned = processed(requests, 1.0, short, torch.zeros(2, VOCAB, device=DEVICE)).isneginf().nonzero().tolist()
        assert banned == ([[0, 5], [1, 6]] if size == 1 else [[0, 5]])
        requests, _ = make([SequenceBiasLogitsProcessor({(*[5] * size, 7): 2.0, (*[5] * (size + 1), 8): 3.0})])
        biased = processed(requests, 1.0, short, torch.zeros(2, VOCAB, device=DEVICE))
        assert biased.nonzero().tolist() == [[0, 7]]


EOS = torch.tensor([3])
# a processor, what is written to it after it was made, and the error's words; None: what transformers makes of it
HELD = {
    "an empty bad word": (NoBadWordsLogitsProcessor([[5], []]), {}, None),
    "an empty bias": (SequenceBiasLogitsProcessor([[[], 1.0], [[3], 2.0]]), {}, None),
    "no tokens to suppress": (SuppressTokensLogitsProcessor([]), {}, None),
    "tokens to suppress that no model has": (SuppressTokensLogitsProcessor([-1, 3, VOCAB, 2**40]), {}, None),
    "ends that no model has": (MinLengthLogitsProcessor(LENGTH + 2, [-1, 3, VOCAB], device=DEVICE), {}, None),
    "no end": (MinNewTokensLengthLogitsProcessor(LENGTH, 2, EOS), {"eos_token_id": torch.tensor([]).to(DEVICE)}, None),
    "a beginning that is past": (ForcedBOSTokenLogitsProcessor(VOCAB), {}, None),
    "a top-k beyond 64 bits": (TopKLogitsWarper(2**70), {}, None),
    "a bias beyond float32": (SequenceBiasLogitsProcessor({(3,): -1e300, (4, 3): -1e300}), {}, None),
    "a bad word": (NoBadWordsLogitsProcessor([[VOCAB]]), {}, "bad_words_ids must hold ids from 0 to 44 .*, got .45]"),
    "a bad word's prefix": (NoBadWordsLogitsProcessor([[VOCAB, 3]]), {}, f"bad_words_ids must hold .* got .{VOCAB}]"),
    "a biased token": (SequenceBiasLogitsProcessor({(VOCAB,): 1.0}), {}, f"sequence_bias must hold .* got .{VOCAB}]"),
    "a forced end": (ForcedEOSTokenLogitsProcessor(LENGTH + 1, VOCAB), {}, "forced_eos_token_id must hold ids"),
    "a top-p of NaN": (TopPLogitsWarper(math.nan), {}, "top_p must be from 0 to 1, got nan"),
    "a penalty of infinity": (RepetitionPenaltyLogitsProcessor(math.inf), {}, "repetition_penalty must be above 0 and"),
    "a bias of NaN": (SequenceBiasLogitsProcessor({(3,): math.nan}), {}, "a bias must be below infinity, got nan"),
}  # fmt: skip


@pytest.mark.parametrize("case", HELD)
def test_what_a_processor_holds_is_checked_before_the_first_token(case):
    """Trap 40.

    What transformers ignores is ignored; what it refuses, at any step, is an error that names the argument."""
    processor, written, message = HELD[case]
    processor = copy.copy(processor)
    vars(processor).update(written)
    if message is None:
        try:
            assert compare([processor], random.Random(case))
        except IndexError:  # transformers 5.17 has them of empty words
            assert "empty" in case
            pytest.skip("this transformers fails over it")
        return
    with pytest.raises(ValueError, match=message):
        make([processor])


def test_a_request_of_another_shape_or_name():
    with pytest.raises(ValueError, match="top_k must be a number or have shape"):
        make([], {"top_k": [1, 2, 3]})
    with pytest.raises(TypeError, match=r"unexpected argument 'soft_cap'\. A request takes logit_bias, "):
        make([], {"soft_cap": 1.0})


def test_a_request_takes_the_place_of_fields():
    bias = torch.arange(VOCAB, device=DEVICE).float()
    given = {"top_p": None, "presence_penalty": [0.5, 0.0], "logit_bias": bias}
    requests, prompt = make([RepetitionPenaltyLogitsProcessor(1.2), TopPLogitsWarper(0.9)], given)
    request = requests.at(prompt)
    assert (request["top_p"], request["repetition_penalty"]) == (1.0, 1.2)
    assert request["presence_penalty"].tolist() == [0.5, 0.0]
    assert torch.equal(request["logit_bias"], bias)
    with pytest.raises(ValueError, match="logit_bias must not be in request with sequence_bias"):
        make([SequenceBiasLogitsProcessor({(3,): 1.0})], {"logit_bias": bias})
