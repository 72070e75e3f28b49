"""``generate`` with drafts: tokens and calls of criteria and streamers are those without, and the model runs less
often."""

import copy
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

from transformers import (  # noqa: E402
    DynamicCache,
    MistralForCausalLM,
    StaticCache,
    StoppingCriteria,
)

from flashsampling import LMHeadSampler  # noqa: E402
from flashsampling.integrations.transformers import NoTokenError, generate  # noqa: E402
from flashsampling.integrations.transformers.arguments import CACHE  # noqa: E402
from flashsampling.integrations.transformers.assisted import PromptLookup  # noqa: E402
from flashsampling.integrations.transformers.processor_params import StepParams  # noqa: E402
from flashsampling.integrations.transformers.processors import ProcessorParams  # noqa: E402
from tests.conftest import DEVICE  # noqa: E402
from tests.integrations.transformers.test_generate import ActsAt, Collector, causal_lm, llama, prompt  # noqa: E402
from tests.integrations.transformers.test_processor_params import FIELDS  # noqa: E402

DRAFTERS = ("look-up", "itself", "first layer", "another model")
OPTIONS = {"max_new_tokens": 14, "eos_token_id": -1, "pad_token_id": 0}


@pytest.fixture(scope="module")
def model():
    """A model that repeats itself, and whose first layer alone says the same every other time."""
    return llama(scale=32)


@pytest.fixture(scope="module")
def assistants(model):
    first = llama(num_hidden_layers=1)
    first.load_state_dict(model.state_dict(), strict=False)
    first.model.embed_tokens, first.lm_head = model.model.embed_tokens, model.lm_head
    return {"itself": copy.deepcopy(model), "first layer": first, "another model": llama(num_hidden_layers=1)}


@pytest.fixture
def drafting(assistants):
    """Returns the arguments of ``generate`` for a drafter."""

    def options(drafter):
        return {"prompt_lookup_num_tokens": 4} if drafter == "look-up" else {"assistant_model": assistants[drafter]}

    return options


@contextmanager
def runs_of(model):
    """The lengths that the model is run over."""
    lengths: list[int] = []
    hook = model.model.register_forward_pre_hook(
        lambda _, args, kwargs: lengths.append(
            (kwargs["inputs_embeds"] if kwargs.get("input_ids") is None else kwargs["input_ids"]).shape[1]
        ),
        with_kwargs=True,
    )
    try:
        yield lengths
    finally:
        hook.remove()


def text(length=9, times=3, **options):
    """A prompt that repeats itself."""
    ids = prompt([length])["input_ids"].repeat(1, times)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)} | options


def drawn(model, **options):
    options = text() | OPTIONS | {"do_sample": True, "custom_generate": generate} | options
    return model.generate(**options, **{"seed": [11]} if options["do_sample"] and "sampler" not in options else {})


CASES = {name: fields for name, fields in FIELDS.items() if name not in ("no cache", "forced_bos_token_id")} | {
    "eos": {"eos_token_id": list(range(3, 900, 7))},
    "words": {"bad_words_ids": [[7, 8], [9]], "sequence_bias": {(5, 6, 7): 3.0, (4,): -1.0}},
    "a request": {
        "request": {"top_k": [40], "frequency_penalty": 0.4, "presence_penalty": [0.2], "repetition_penalty": 1.2}
    },
    "a mask": {
        "request": {"token_mask": torch.full((1, 40), 0x77777777, dtype=torch.int32, device=DEVICE)}, "min_length": 32
    },
    "a forced beginning": {
        "forced_bos_token_id": 77, "input_ids": torch.tensor([[5]]), "attention_mask": torch.tensor([[1]])
    },
    "a temperature": {"temperatures": [0.4], "top_k": 0},
    "max_length": {"max_length": 33, "max_new_tokens": None},
    "a padded prompt": prompt([9, 4]),
    "chunked prefill": {"prefill_chunk_size": 4},
}  # fmt: skip
CASES["a padded prompt"] = {name: value[1:] for name, value in CASES["a padded prompt"].items()}


GREEDY = ("default settings", "repetition_penalty", "no_repeat_ngram_size", "everything", "eos")


@pytest.mark.quick(27)
@pytest.mark.parametrize(
    ("case", "do_sample"), [*((case, True) for case in CASES), *((case, False) for case in GREEDY)]
)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_tokens_are_those_without_drafts(model, drafting, drafter, case, do_sample):
    options = {"eos_token_id": 2, "do_sample": do_sample} | {
        name: value.to(DEVICE) if isinstance(value, torch.Tensor) else value for name, value in CASES[case].items()
    }
    assert torch.equal(drawn(model, **options, **drafting(drafter)), drawn(model, **options))


def test_a_drafts_nan_is_not_the_texts(monkeypatch):
    """Attention of weight 0 to a NaN is NaN: a draft that has no state leaves the positions before it without one,
    too."""
    model = llama(vocab_size=40)
    given = text(length=6, times=2, max_new_tokens=12, top_k=0)
    given["input_ids"] = given["input_ids"] % 40
    plain = drawn(model, **given)[0].tolist()
    embeddings = model.model.embed_tokens.weight.detach().clone()
    absent = next(token for token in range(40) if token not in plain)
    drafts = [absent, plain[-4]]
    monkeypatch.setattr(
        PromptLookup, "drafts", lambda self, ids, most: torch.tensor([drafts[:most]], device=ids.device)
    )

    def ways(broken):
        """Tokens, sampler offsets and errors are the same with and without drafts."""
        with torch.no_grad():
            model.model.embed_tokens.weight.copy_(embeddings)[broken] = float("nan")
        for options in ({}, {"prompt_lookup_num_tokens": 2}):
            sampler = LMHeadSampler(model.lm_head, max_batch_size=1, seed=[11])
            error, streamer = "", Collector()
            try:
                drawn(model, **given, **options, sampler=sampler, streamer=streamer)
            except NoTokenError as failed:
                error = str(failed)
            yield [step.tolist() for step in streamer.steps], sampler.offsets.tolist(), error

    without, drafted = ways(absent)
    assert drafted == without
    assert without[1:] == ([12], "")
    without, drafted = ways(plain[-4])
    assert drafted == without
    assert without[2]


mistral = partial(causal_lm, MistralForCausalLM, scale=32, sliding_window=8)


@pytest.mark.quick(4)
@pytest.mark.parametrize("chunk", [None, 4, 20])
@pytest.mark.parametrize("drafter", ["look-up", "itself", "another model"])
def test_sliding_windows_and_a_prompt_in_chunks(drafter, chunk):
    """An assistant runs several times before it is cut back, which a window's cache of transformers 5.15 to 5.17 cannot
    do."""
    model = mistral()
    drafts: dict[str, Any] = {
        "look-up": {"prompt_lookup_num_tokens": 4},
        "itself": {"assistant_model": copy.deepcopy(model)},
        "another model": {"assistant_model": mistral(num_hidden_layers=1)},
    }[drafter]
    options = {"prefill_chunk_size": chunk, "repetition_penalty": 0.5}
    expected = drawn(model, **options)
    with runs_of(model) as lengths:
        assert torch.equal(drawn(model, **options, **drafts), expected)
    prompt_runs = {None: [27], 4: [4, 4, 4, 4, 4, 4, 3], 20: [20, 7]}[chunk]
    assert lengths[: len(prompt_runs)] == prompt_runs
    assert max(lengths[len(prompt_runs) :]) > 1  # drafts


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    ("drafter", "most", "options"),
    [
        ("itself", 6, {"temperature": 1.5}),  # 1 from the prompt, then 6 a run
        ("itself", 6, {"temperature": 1.5, "repetition_penalty": 1.5, "min_new_tokens": 4}),
        ("first layer", 22, {"top_k": 0}),
        ("look-up", 28, {"do_sample": False}),
        ("another model", 31, {}),
    ],
)
def test_good_drafts_save_runs_of_the_model(model, drafting, drafter, most, options):
    """31 tokens take few runs: with noise of its own a sampling assistant would agree once in some hundred tokens."""
    options = options | {"max_new_tokens": 31}
    with runs_of(model) as plain:
        expected = drawn(model, **options)
    with runs_of(model) as drafted:
        assert torch.equal(drawn(model, **options, **drafting(drafter)), expected)
    assert len(plain) == 31
    assert len(drafted) <= most
    assert drafted[0] == 27
    assert 1 <= min(drafted[1:]) <= max(drafted[1:]) <= 6


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_no_more_tokens_than_asked_for(model, drafting, drafter):
    for new in (1, 2, 3, 7):
        with runs_of(model) as lengths:
            out = drawn(model, max_new_tokens=new, **drafting(drafter))
        assert out.shape == (1, 27 + new)
        assert sum(lengths[1:]) <= 6 * (new - 1)
        assert torch.equal(out, drawn(model, max_new_tokens=new))


def test_an_end_within_the_drafts(model, drafting):
    """The sampler's offset and the cache are what they are without drafts, so what comes next is, too."""
    free = drawn(model)[0, 27:].tolist()
    place = next(place for place in range(8, 12) if free[place] not in free[:place])
    assert (place + 1) % 6  # not the last of a run's six tokens
    for drafter in (None, *DRAFTERS):
        sampler = LMHeadSampler.from_model(model, max_batch_size=3, seed=[11, 12, 13])
        options = {} if drafter is None else drafting(drafter)
        out = drawn(model, sampler=sampler, eos_token_id=free[place], return_dict_in_generate=True, **options)
        assert out.sequences[0, 27:].tolist() == free[: place + 1]
        assert sampler.offsets.tolist() == [place + 1, 0, 0]
        assert out[CACHE].get_seq_length() == 27 + place
        assert set(out.keys()) == {"sequences", CACHE}
        whole = {"input_ids": out.sequences, "attention_mask": torch.ones_like(out.sequences)}
        more = drawn(model, sampler=sampler, **{CACHE: out[CACHE]}, max_new_tokens=3, **whole, **options)
        assert more[0, 27:].tolist() == free[: place + 1 + 3]


class Sees(StoppingCriteria):
    """Stops at the fifth token, as one that counts its calls."""

    def __init__(self):
        self.lengths = []

    def __call__(self, input_ids, scores, **_):
        assert scores is None
        self.lengths.append(input_ids.shape[1])
        return torch.tensor([len(self.lengths) == 5], device=input_ids.device)


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_criteria_and_streamers_see_every_token(model, drafting, drafter):
    seen = []
    cases: tuple[dict[str, Any], ...] = ({}, drafting(drafter))
    for options in cases:
        streamer, criterion = Collector(), Sees()
        out = drawn(model, streamer=streamer, stopping_criteria=[criterion], **options)
        assert criterion.lengths == [28, 29, 30, 31, 32]
        assert streamer.ends == 1
        assert torch.equal(streamer.steps[0], out[:, :27].cpu())
        assert [tuple(step.shape) for step in streamer.steps[1:]] == [(1,)] * 5
        assert torch.equal(torch.stack(streamer.steps[1:], dim=1), out[:, 27:].cpu())
        seen.append(out)
    assert torch.equal(*seen)


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_no_token(model, drafting, drafter):
    """Three tokens are allowed, once each, and drafts go on."""
    mask = torch.zeros(32, dtype=torch.int32, device=DEVICE)
    mask[31] = 0b111
    cases: tuple[dict[str, Any], ...] = ({}, drafting(drafter))
    for options in cases:
        streamer = Collector()
        with pytest.raises(NoTokenError, match=r"rows \[0\] of the batch at new token 4:") as error:
            drawn(model, request={"token_mask": mask}, no_repeat_ngram_size=1, streamer=streamer, **options)
        assert error.value.rows == [0]
        assert sorted(torch.cat(streamer.steps[1:]).tolist()) == [992, 993, 994]
        assert streamer.ends == 1
    assert not model.lm_head._forward_hooks


def test_embeddings_as_a_prompt(model, drafting):
    """The penalty ignores the first new tokens of a padded prompt of embeddings; drafts start once it counts."""
    inputs = {name: value[1:] for name, value in prompt([19, 10]).items()}
    embeds = {"input_ids": None, "inputs_embeds": model.get_input_embeddings()(inputs["input_ids"])}
    embeds |= {"attention_mask": inputs["attention_mask"], "repetition_penalty": 1.5, "max_new_tokens": 30}
    for do_sample in (True, False):
        embeds["do_sample"] = do_sample
        assert torch.equal(drawn(model, **embeds, **drafting("look-up")), drawn(model, **embeds))
    with pytest.raises(ValueError, match="assistant_model reads the prompt's ids: inputs_embeds"):
        drawn(model, **embeds, **drafting("itself"))


def test_drafts_end_where_a_bias_depends_on_them():
    taken = ProcessorParams()
    taken.biases = [((4, 5), 1.0), ((7,), 2.0)]
    requests = StepParams(taken, torch.tensor([[1, 2]], device=DEVICE), 1000, torch.device(DEVICE), {})
    ids = torch.tensor([[1, 2]], device=DEVICE)
    for drafts, fit in (([3, 3, 3], 3), ([3, 4, 5, 6], 1), ([4, 5], 0), ([], 0), ([5, 5, 4], 2)):
        request: Any
        request, count = requests.over(ids, torch.tensor([drafts], dtype=torch.int64, device=DEVICE))
        assert count == fit
        assert request["logit_bias"][0].tolist() == [[7, -1]]
    request, count = requests.over(torch.tensor([[2, 4]], device=DEVICE), torch.tensor([[4, 4, 1]], device=DEVICE))
    assert count == 2
    assert request["logit_bias"][0].tolist() == [[7, 5]]


def test_how_many_an_assistant_drafts(model, assistants, monkeypatch):
    """Its own configuration says, as in transformers."""
    drawn(model, max_new_tokens=1)  # a model that is new is run to see what it makes of its logits
    rounds = {}
    for count, schedule in ((None, None), (2, "constant"), (2, "heuristic"), (9, "heuristic_transient")):
        monkeypatch.setattr(assistants["itself"].generation_config, "num_assistant_tokens", count)
        monkeypatch.setattr(assistants["itself"].generation_config, "num_assistant_tokens_schedule", schedule)
        with runs_of(model) as lengths:
            drawn(model, max_new_tokens=25, assistant_model=assistants["itself"])
        rounds[count, schedule] = lengths[1:]
        assert assistants["itself"].generation_config.num_assistant_tokens == count
    assert rounds[None, None] == [6, 6, 6, 6]
    assert rounds[2, "constant"] == [3] * 8
    assert rounds[2, "heuristic"] == [3, 5, 7, 9]
    assert rounds[9, "heuristic_transient"] == [10, 12, 2]


def small(**options):
    return llama(num_hidden_layers=1, **options)


def clamps(model):
    def clamp(module, args, output):
        output.logits = output.logits.clamp(-1, 1)
        return output

    model.register_forward_hook(clamp)
    return model


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a batch": (prompt([5, 6]), "drafts are verified for one sequence at a time, as in transformers, got 2"),
    "sequences": ({"num_return_sequences": 2, "do_sample": True}, "num_return_sequences has to"),  # by transformers
    "both": ({"assistant_model": small}, "from assistant_model or from prompt_lookup_num_tokens, got both"),
    "logprobs": ({"return_dict_in_generate": True, "return_logprobs": True}, "return_logprobs is not supported with"),
    "top": ({"return_dict_in_generate": True, "top_logprobs": 2}, "top_logprobs is not supported with drafts"),
    "attentions": ({"return_dict_in_generate": True, "output_attentions": True}, "output_attentions is not supported"),
    "states": ({"return_dict_in_generate": True, "output_hidden_states": True}, "output_hidden_states is not"),
    "no cache": ({"use_cache": False}, "drafts need a key and value cache: use_cache=True"),
    "a static cache": ({CACHE: lambda: StaticCache(small().config, 64)}, "got StaticCache of StaticLayer: static"),
    "an ensemble": ({"assistant_ensemble_weight": 0.5}, "assistant_ensemble_weight is not supported"),
    "another vocabulary": (
        {"prompt_lookup_num_tokens": None, "assistant_model": lambda: small(vocab_size=999)},
        "assistant_model must have the model's 1000 tokens, got LlamaForCausalLM with 999",
    ),
    "no assistant": (
        {"prompt_lookup_num_tokens": None, "assistant_model": lambda: small().model},
        "assistant_model cannot draft: the model's output embedding",
    ),
    "an assistant of other logits": (
        {"prompt_lookup_num_tokens": None, "assistant_model": lambda: clamps(small())},
        "assistant_model cannot draft: LlamaForCausalLM changes the logits after its LM head .clamp.",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_go_with_drafts_is_an_error_by_name_before_the_first_token(model, case):
    options, message = REFUSED[case]
    streamer = Collector()
    options = {name: value() if callable(value) else value for name, value in options.items()}
    arguments = text() | OPTIONS | {"prompt_lookup_num_tokens": 2, "custom_generate": generate, "streamer": streamer}
    with pytest.raises((ValueError, TypeError), match=message):
        model.generate(**arguments | options)
    assert len(streamer.steps) <= 1  # the prompt
    assert not model.lm_head._forward_hooks


def test_a_sampler_over_several_gpus_is_refused(model):
    sampler = LMHeadSampler.from_model(model, max_batch_size=1)
    sampler.tp = object()  # type: ignore[assignment]
    with pytest.raises(ValueError, match="sampler must be without tp with drafts"):
        drawn(model, sampler=sampler, prompt_lookup_num_tokens=2)


@pytest.mark.parametrize("drafting", [{}, {"assistant_model": True}])
@pytest.mark.parametrize("puts", [2, 4, 8])
def test_a_streamer_that_raises_within_a_round(model, drafting, puts):
    """After an error of a streamer, sampler and cache hold no token behind the last one it got."""

    def interrupt():
        raise InterruptedError

    options = {name: model for name in drafting}
    sampler, cache = LMHeadSampler.from_model(model, max_batch_size=1, seed=[1]), DynamicCache()
    with pytest.raises(InterruptedError):
        drawn(
            model, sampler=sampler, streamer=ActsAt(puts + 1, interrupt), **{CACHE: cache}, eos_token_id=-1, **options
        )
    assert sampler.offsets.tolist() == [puts]
    assert cache.get_seq_length() == 27 + puts - 1
