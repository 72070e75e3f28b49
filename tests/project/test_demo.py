"""The demo's command line: what a slip of the pen costs; what it prints."""

import io
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers")
typer = pytest.importorskip("typer")
rich_console = pytest.importorskip("rich.console")

from scripts import demo_generate  # noqa: E402
from scripts.demo_generate import load_model  # noqa: E402

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", ["smollm", "two words", "/dev/null"])
def test_whatever_is_wrong_with_the_name(name, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # it would try again for most of a minute
    with pytest.raises(typer.BadParameter, match=f"^'{name}' cannot be loaded: .+$") as raised:
        load_model(name, "cpu", torch.float32)
    assert raised.value.param_hint == "--model"
    assert "\n" not in str(raised.value)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A folder with a random model and a tokenizer of 50 words."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(50)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=50, **sizes, eos_token_id=None)
    folder = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w1", eos_token="w2").save_pretrained(folder)
    return folder


@pytest.mark.quick(0)
def test_a_pipe_gets_lines_with_counts_and_nothing_stray(tiny):
    words = ["--model", str(tiny), "--prompt", "w3 w4", "--prompt", "w5", "--tokens", "20", "--compare"]
    environment = os.environ | {"COLUMNS": "200", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "scripts.demo_generate", *words]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    assert (run.returncode, run.stderr) == (0, "")
    expected = [
        r"^loading /.*tiny",
        r"^loaded in \d+\.\d s, as float32 on cpu$",
        r"^FlashSampling \(streaming\): token 8 of 20, \d+\.\d s$",
        r"^FlashSampling \(streaming\): token 20 of 20, \d+\.\d s$",
        r"^40 tokens in 20 steps, \d+\.\d s$",
        r"^A CPU is not what FlashSampling is for: ",
        r"^timing both, 3 runs of 16 tokens each, in turn: about \d+ s \(--no-timing: without\)$",
        r"^timing: run 1 of 6, \d+\.\d s$",
        r"^timing: run 6 of 6, \d+\.\d s$",
        r"tiny\d* on cpu, 2 prompts at once, up to 16 new tokens each; medians, prompts included$",
        r"│ FlashSampling \(streaming\) +│ \d+\.\d +│ \d+\.\d +│$",
        r"│ transformers' own generate +│ \d+\.\d +│ \d+\.\d +│$",
        r"^plain logits and the same noise: token 20 of 20, \d+\.\d s$",
        r"^every one of the 40 tokens equals plain logits \+ the same noise$",
    ]
    at = 0
    for pattern in expected:  # in this order
        found = re.compile(pattern, flags=re.MULTILINE).search(run.stdout, at)
        assert found, f"{pattern} not in {run.stdout[at:]}"
        at = found.start()


@pytest.mark.parametrize(("terminal", "temperature"), [(True, 0.7), (False, 0.0)])
def test_a_terminal_sees_every_token_and_no_timing_ends_after_the_text(tiny, terminal, temperature, monkeypatch, capfd):
    out = io.StringIO()
    console = rich_console.Console(file=out, force_terminal=terminal, color_system=None)
    monkeypatch.setattr(demo_generate, "_console", console)
    # refreshed or not
    monkeypatch.setattr("scripts.demo_generate.Live.update", lambda live, text: live.console.print(text))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    options = {"tokens": 9, "timing": False, "seed": 0, "impl": None, "compare": False}
    demo_generate.main(prompt=["w3"], model=str(tiny), temperature=temperature, **options)
    counts = [int(count) for count in re.findall(r"token (\d+) of 9", out.getvalue())]
    assert counts == (list(range(1, 10)) if terminal else [8, 9])
    assert "tokens in 9 steps" in out.getvalue()
    assert "timing" not in out.getvalue()
    assert "[transformers]" not in capfd.readouterr().err
    assert "tokens/s" not in out.getvalue()


@pytest.mark.parametrize(("ends", "count"), [(None, 6), (2, 5), ([2, 6], 4), ([9], 6), ([5], 2)])
def test_padding_is_not_counted(ends, count):
    assert demo_generate._count_drawn(torch.tensor([[5, 2, 2], [5, 6, 7]]), ends) == count
