"""``scripts/speculate``: the loop, its drafters, and that ``--compare`` says what it says."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("transformers")
typer = pytest.importorskip("typer")

from transformers import Gemma2Config, Gemma2ForCausalLM, GPT2Config, GPT2LMHeadModel  # noqa: E402

from flashsampling.integrations.transformers import generate  # noqa: E402

from ..conftest import DEVICE, load_script, run_python  # noqa: E402


@pytest.fixture(scope="module")
def script():
    return load_script("speculate")


@pytest.mark.quick(0)
def test_it_runs_and_compares():
    options = ["--random", "--compare", "--tokens", 6, "--drafts", 3, "--batch", 3]
    said = run_python("scripts/speculate", *options, COLUMNS="120", NO_COLOR="1", CUDA_VISIBLE_DEVICES="")
    assert "all 18 tokens are those of decoding without drafts" in said
    for drafter in ("no drafts", "n-grams", "first 2 layers"):
        assert drafter in said


def test_look_up(script):
    text = script.Text(torch.tensor([[1, 2, 3, 4, 1, 2], [5, 6, 5, 6, 5, 6], [1, 2, 3, 4, 5, 6]]), 5)
    assert script.look_up(text, 3).tolist() == [[3, 4, 1], [5, 6, -1], [-1, -1, -1]]


def test_text_that_grows_by_rows(script):
    text = script.Text(torch.tensor([[1, 2], [3, 4]]), 4)
    text.append(torch.tensor([[7, -1], [8, 9]]))
    text.append(torch.tensor([[-1, -1], [5, -1]]))
    assert text.ids.tolist() == [[1, 2, 7, -1, -1, -1], [3, 4, 8, 9, 5, -1]]
    assert text.lengths.tolist() == [3, 5]


def test_look_up_in_a_text_of_one_token(script):
    text = script.Text(torch.tensor([[1], [2]]), 5)
    assert script.look_up(text, 3).tolist() == [[-1, -1, -1]] * 2


class Tokenizer:
    """Of ids that are words; remembers what it is to write."""

    def __call__(self, words, return_tensors):
        return SimpleNamespace(input_ids=torch.tensor([[int(word) for word in words.split()]]))

    def decode(self, ids):
        self.written = ids.tolist()
        return " ".join(map(str, self.written))


def gemma():
    torch.manual_seed(0)
    sizes = {"vocab_size": 60, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "head_dim": 8}
    model = Gemma2ForCausalLM(
        Gemma2Config(
            **sizes, num_attention_heads=2, num_key_value_heads=1, final_logit_softcapping=0.5, eos_token_id=None
        )
    )
    model.get_output_embeddings().weight.data.normal_(0, 1.0)
    return model.eval()


def test_models_that_cap_their_logits(script, monkeypatch):
    """Tokens are those of ``generate``, and the drafter of all layers, which has the cap as well, is always right."""
    model, tokenizer = gemma().to(DEVICE), Tokenizer()
    monkeypatch.setattr(script, "load_model", lambda *_: (model, tokenizer))
    rounds, speculate = [], script.speculate

    def recorded(*arguments):
        rounds.append(speculate(*arguments))
        return rounds[-1]

    monkeypatch.setattr(script, "speculate", recorded)
    script.main(model="gemma", prompt="3 4 5", batch=1, tokens=8, layers=2, compare=True, seed=4)
    ids = torch.tensor([[3, 4, 5]], device=DEVICE)
    options = {"do_sample": True, "top_k": 0, "temperature": 0.7, "seed": [4], "max_new_tokens": 8, "pad_token_id": 0}
    expected = model.generate(ids, attention_mask=torch.ones_like(ids), custom_generate=generate, **options)
    assert tokenizer.written == expected[0, 3:].tolist()
    assert rounds[2].accepted == rounds[2].drafted > 0


@pytest.mark.parametrize(
    ("prompt", "model", "message"),
    [
        ("", gemma, "must have a token"),
        (
            "3 4",
            lambda: GPT2LMHeadModel(GPT2Config(vocab_size=60, n_embd=16, n_layer=1, n_head=2)),
            "GPT2LMHeadModel keeps",
        ),
    ],
)
def test_what_is_refused(script, monkeypatch, prompt, model, message):
    monkeypatch.setattr(script, "load_model", lambda *_: (model(), Tokenizer()))
    with pytest.raises(typer.BadParameter, match=message):
        script.main(model="one", prompt=prompt)


def test_seeds_wrap_around(script, monkeypatch):
    seeds, speculate = [], script.speculate

    def recorded(target, propose, sampler, *others):
        seeds.append(sampler.seeds.tolist())
        return speculate(target, propose, sampler, *others)

    monkeypatch.setattr(script, "speculate", recorded)
    script.main(random=True, batch=2, tokens=2, seed=2**63 - 1)
    assert seeds == [[2**63 - 1, -(2**63)]] * 3
