"""The benchmark of verifying drafts: ``python -m benchmarks.verify --spectra FOLDER``.

match       ``verify`` of B requests of n drafts beside ``sample`` of as many rows, B * (n + 1)
rejection   ``verify`` with the drafts' probabilities beside two peers: cuBLAS's logits, a softmax, and a rejection
            sampler in compiled torch, or FlashInfer's ``chain_speculative_sampling`` where it is installed; some cells
            have top-k and top-p too: in torch over the 50 highest logits, or by FlashInfer's renormalising functions
drafter     a drafter of one layer and its head, for one draft: with ``sample``, and with logits, softmax and a compiled
            multinomial

Interleaved in one run, in CUDA graphs. Nothing is timed before its tokens are what torch's operations give, or, of a
peer that draws with noise of its own, before it accepts as many drafts as theory says and draws what is left to draw.
"""

import functools
import importlib.util
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any
from unittest import mock

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor

from flashsampling import sample, verify
from flashsampling.speculative import acceptance

from . import plots
from .from_logits import TOP_K, TOP_P, filled, spectrum
from .requests import head_of
from .tables import DRAFTS_PEERS
from .timing import Call, interleaved_medians, machine

HEADS = [(151936, 4096), (128256, 8192)]  # V, D
BATCHES = [1, 8, 32, 64]
DRAFTS = [3, 7]
CHECKED = 4  # requests that are compared with torch's operations
LIMIT = 1.02  # match, times the step of as many rows
TIMES = 32  # draws of a peer behind its gate
Sampler = Callable[[], Tensor]  # -> (B, n + 1) tokens


def drafted(states: Tensor, weight: Tensor, n: int) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """Returns sampling parameters of B requests, drafts (B, n), and their probabilities (B, n, V): the target's,
    blurred."""
    batch, vocab = len(states) // (n + 1), len(weight)
    rows = {
        "temperature": torch.ones(batch, device="cuda"),
        "offset": torch.zeros(batch, dtype=torch.int64, device="cuda"),
    }
    rows["seed"] = torch.randint(-(2**63), 2**63 - 1, (batch,), device="cuda")
    before = states.view(batch, n + 1, -1)[:, :-1].flatten(0, 1)
    q = torch.empty(batch * n, vocab, device="cuda")
    for first in range(0, batch * n, 64):
        logits = torch.mm(before[first : first + 64], weight.T).float()
        q[first : first + 64] = torch.softmax(logits + 0.5 * torch.randn_like(logits), dim=-1)
    ids = torch.cat([torch.multinomial(some, 1)[:, 0] for some in q.split(64)])
    return rows, ids.view(batch, n), q.view(batch, n, vocab)


def rejected_by_torch(target: Tensor, draft_probs: Tensor, ids: Tensor) -> Tensor:
    """(B, n + 1): as a decoder writes it, from the target's probabilities (B, n + 1, V)."""
    batch, n = ids.shape
    p = target[:, :-1].gather(2, ids[:, :, None])[:, :, 0]
    q = draft_probs.gather(2, ids[:, :, None])[:, :, 0]
    count = (torch.rand_like(p) * q < p).long().cumprod(dim=1).sum(dim=1)
    requests = torch.arange(batch, device=ids.device)
    refused = draft_probs[requests, count.clamp(max=n - 1)] * (count < n)[:, None]
    left = (target[requests, count] - refused).clamp(min=0.0)
    token = (left / torch.empty_like(left).exponential_()).argmax(dim=-1)
    node = torch.arange(n + 1, device=ids.device)
    out = torch.where(node < count[:, None], torch.nn.functional.pad(ids, (0, 1)), -1)
    return torch.where(node == count[:, None], token[:, None], out)


def _logits(states: Tensor, weight: Tensor) -> Tensor:
    """(R, V) float32, as a decoder has them: a model's head gives 16 bits."""
    return torch.mm(states, weight.T).float()


def _probabilities(states: Tensor, weight: Tensor, temperature: Tensor, n: int, filters: str) -> Tensor:
    """The target's (B, n + 1, V), float32."""
    logits = _logits(states, weight) / temperature.repeat_interleave(n + 1)[:, None]
    if filters == "none":
        return torch.softmax(logits, dim=-1).view(len(temperature), n + 1, -1)
    highest, ids = logits.topk(TOP_K, dim=-1)
    p = torch.softmax(highest, dim=-1)
    p = torch.where(p.cumsum(dim=-1) - p < TOP_P, p, 0.0)
    p = p / p.sum(dim=-1, keepdim=True)
    return torch.zeros_like(logits).scatter_(1, ids, p).view(len(temperature), n + 1, -1)


def _flashinfer(states: Tensor, weight: Tensor, ids: Tensor, q: Tensor, offset: Tensor, filters: str) -> Sampler:
    """cuBLAS's logits, FlashInfer's softmax, its filters, its rejection. ``offset`` (1,) int64: of its noise."""
    from flashinfer import sampling

    (batch, n), narrow, seed = ids.shape, ids.int(), torch.full_like(offset, 7)

    def step() -> Tensor:
        p = sampling.softmax(_logits(states, weight))
        if filters != "none":
            p = sampling.top_p_renorm_probs(sampling.top_k_renorm_probs(p, TOP_K), TOP_P)
        out: Tensor = sampling.chain_speculative_sampling(
            q, narrow, p.view(batch, n + 1, -1), seed=seed, offset=offset
        )[0]
        return out

    return step


def check_sampler(name: str, draw: Sampler, p: Tensor, q: Tensor, ids: Tensor, slack: float) -> None:
    """Checks a peer that draws with noise of its own: the layout of its tokens in one call, and over ``TIMES`` calls
    how many drafts it accepts and what it draws after them."""
    batch, n = ids.shape
    held = q.gather(2, ids[:, :, None])[:, :, 0].double()
    ratio = (p[:, :-1].gather(2, ids[:, :, None])[:, :, 0].double() / held).clamp(max=1.0)
    reached = ratio.cumprod(dim=1)  # the probability that so many are accepted, or more
    mean = reached.sum(dim=1)
    square = (reached * (2 * torch.arange(1, n + 1, device=ids.device) - 1)).sum(dim=1)
    expected, deviation = float(mean.sum()) * TIMES, math.sqrt(float((square - mean**2).sum()) * TIMES)
    accepted, strange = 0, 0
    node, requests = torch.arange(n + 1, device=ids.device), torch.arange(batch, device=ids.device)
    for _ in range(TIMES):
        out = draw().long()
        count = (out >= 0).sum(dim=1) - 1
        assert bool((count >= 0).all()), f"{name}: a request without a token"
        drafts = torch.nn.functional.pad(ids, (0, 1), value=-1)
        assert torch.equal(
            torch.where(node < count[:, None], out, -1), torch.where(node < count[:, None], drafts, -1)
        ), name
        assert bool((out[node > count[:, None]] == -1).all()), name
        token = out.gather(1, count[:, None])[:, 0]
        left = p[requests, count, token] - (count < n) * q[requests, count.clamp(max=n - 1), token]
        strange += int((left <= 0).sum())
        accepted += int(count.sum())
    assert strange <= max(slack * TIMES * batch, 2), (
        f"{name}: {strange} tokens of {TIMES * batch} that are not left to draw"
    )
    assert abs(accepted - expected) <= 5 * deviation + slack * expected + 1, (
        f"{name}: {accepted} accepted, not {expected:.0f}"
    )


def _row(
    held: tuple[Tensor, Tensor, int], vocab: int, dim: int, batch: int, n: int, rounds: int, filters: str
) -> dict[str, Any]:
    """The correctness gates, then the times."""
    rows = batch * (n + 1)
    states, weight = head_of(filled(*held, rows, vocab, torch.float32), dim)
    parameters, ids, q = drafted(states, weight, n)
    if filters != "none":
        parameters["top_k"] = torch.full((batch,), TOP_K, dtype=torch.int64, device="cuda")
        parameters["top_p"] = torch.full((batch,), TOP_P, device="cuda")
    shaped = states.view(batch, n + 1, dim)
    spread = {name: value.repeat_interleave(n + 1) for name, value in parameters.items()}
    spread["offset"] = spread["offset"] + torch.arange(n + 1, device="cuda").repeat(batch)
    tokens = sample(states, weight, **spread).token_ids  # type: ignore[arg-type]
    half = tokens.view(batch, n + 1)[:, :n].clone()
    half[:, n // 2 :] = ids[:, n // 2 :]  # the first ones are what the target draws
    some = slice(0, min(batch, CHECKED))
    of_some = {name: value[some] for name, value in parameters.items()}
    for method, drafts, probs in (("match", half, None), ("rejection", ids, q)):
        arguments: Any = (shaped[some], weight, drafts[some]), {"method": method, **of_some}
        arguments[1].update({} if probs is None else {"draft_probs": probs[some]})
        ours = verify(*arguments[0], **arguments[1])
        with mock.patch.object(acceptance, "_runs_kernels", return_value=False):
            theirs = verify(*arguments[0], **arguments[1])
        assert torch.equal(ours.token_ids, theirs.token_ids), f"{method}: {ours.token_ids} {theirs.token_ids}"
    steps: dict[str, Call] = {
        "sample": functools.partial(sample, states, weight, **spread),  # type: ignore[arg-type]
        "match": functools.partial(verify, shaped, weight, half, **parameters),  # type: ignore[arg-type]
        "rejection": functools.partial(verify, shaped, weight, ids, method="rejection", draft_probs=q, **parameters),  # type: ignore[arg-type]
    }
    out16 = torch.empty(rows, vocab, dtype=torch.bfloat16, device="cuda")
    steps["cuBLAS alone"] = lambda: torch.mm(states, weight.T, out=out16)
    torch._dynamo.reset()  # or it is compiled once, for any number of rows

    def in_torch() -> Tensor:
        return rejected_by_torch(_probabilities(states, weight, parameters["temperature"], n, filters), q, ids)

    peers: dict[str, Sampler] = {"compiled torch": torch.compile(in_torch, dynamic=False)}
    offset = torch.zeros(1, dtype=torch.int64, device="cuda")
    if importlib.util.find_spec("flashinfer") is not None:
        peers["FlashInfer"] = _flashinfer(states, weight, ids, q, offset, filters)
    p = _probabilities(states, weight, parameters["temperature"], n, filters)
    for name, draw in peers.items():

        def drawn_anew(draw: Sampler = draw) -> Tensor:
            offset.add_(1 << 20)
            return draw()

        # with filters tokens that 16 bits make equal to the last one that is kept are another's choice
        check_sampler(name, drawn_anew, p, q, ids, slack=1e-3 if filters == "none" else 0.05)
    del p
    steps |= peers
    out = verify(shaped, weight, ids, method="rejection", draft_probs=q, **parameters)  # type: ignore[arg-type]
    accepted = float(out.num_accepted.float().mean())
    ms = interleaved_medians(steps, rounds)
    return {
        "vocab": vocab, "dim": dim, "filters": filters, "batch": batch, "drafts": n, "accepted": accepted, "ms": ms,
    }  # fmt: skip


def _drafter(vocab: int, dim: int, batch: int, rounds: int) -> dict[str, Any]:
    """One draft of a drafter of one layer."""
    from transformers import LlamaConfig, LlamaModel

    config = LlamaConfig(
        vocab_size=8, hidden_size=dim, intermediate_size=3 * dim, num_hidden_layers=1, num_attention_heads=dim // 128
    )
    model = LlamaModel(config).to("cuda", torch.bfloat16).eval()
    embedding = torch.randn(batch, 1, dim, dtype=torch.bfloat16, device="cuda")
    weight = torch.randn(vocab, dim, device="cuda").mul_(dim**-0.5).bfloat16()
    seed, offset = torch.arange(batch, device="cuda"), torch.zeros(batch, dtype=torch.int64, device="cuda")

    @torch.no_grad()
    def layer() -> Tensor:
        hidden: Tensor = model(inputs_embeds=embedding, use_cache=False).last_hidden_state
        return hidden[:, 0]

    @torch.compile
    def multinomial(states: Tensor) -> Tensor:
        probs = torch.softmax(torch.mm(states, weight.T).float(), dim=-1)
        return (probs / torch.empty_like(probs).exponential_()).argmax(dim=-1)

    steps: dict[str, Call] = {
        "layer": layer,
        "layer, sample": lambda: sample(layer(), weight, seed=seed, offset=offset),
        "layer, logits, softmax, multinomial": lambda: multinomial(layer()),
    }
    return {"vocab": vocab, "dim": dim, "batch": batch, "ms": interleaved_medians(steps, rounds)}


def main(
    spectra: Annotated[
        Path | None, typer.Option(help="Folder of npz files of real logits; without it: Zipf's law.")
    ] = None,
    name: Annotated[str, typer.Option(help="Which of them.")] = "gemma3-270m",
    out: Annotated[Path, typer.Option(help="Folder for verify.json.")] = Path("benchmarks/results"),
    rounds: Annotated[int, typer.Option(min=3, help="Interleaved replays per step.")] = 30,
    batches: Annotated[str, typer.Option(help="Comma-separated requests.")] = ",".join(map(str, BATCHES)),
    check: Annotated[
        bool,
        typer.Option(
            help=f"Exit 1 if match takes more than {LIMIT} times as long as its rows, or rejection as a peer."
        ),
    ] = False,
) -> None:
    """Times the verification of drafts, and a drafter."""
    if not torch.cuda.is_available():
        raise typer.BadParameter("this benchmark needs a CUDA device")
    torch.manual_seed(0)
    console = Console(width=200)
    out.mkdir(parents=True, exist_ok=True)
    held = spectrum(spectra, name)
    result: dict[str, Any] = {
        "machine": machine(),
        "logits": name if spectra else "Zipf's law",
        "rows": [],
        "drafter": [],
    }
    sizes = [int(batch) for batch in batches.split(",")]
    for vocab, dim in HEADS:
        # with filters the larger number of drafts at the first head is enough: a cell is a torch.compile of ten seconds
        cells_of = [(n, "none") for n in DRAFTS] + [(DRAFTS[-1], "top-k, top-p")] * ((vocab, dim) == HEADS[0])
        rows = [_row(held, vocab, dim, batch, n, rounds, filters) for n, filters in cells_of for batch in sizes]
        title = f"V={vocab} D={dim}: ms (over sample of B (n + 1) rows)"
        table = Table("filters", "n", "B", "accepted", *rows[0]["ms"], title=title)
        for row in rows:
            cells = [f"{ms:.3f} ({ms / row['ms']['sample']:.2f})" for ms in row["ms"].values()]
            table.add_row(row["filters"], str(row["drafts"]), str(row["batch"]), f"{row['accepted']:.2f}", *cells)
        console.print(table)
        result["rows"] += rows
        (out / "verify.json").write_text(json.dumps(result, indent=1) + "\n")
    result["drafter"] = [_drafter(151936, dim, batch, rounds) for dim in (2048, 4096) for batch in sizes]
    table = Table("D", "B", *result["drafter"][0]["ms"], title="A drafter of one layer, V=151936: ms of a draft")
    for row in result["drafter"]:
        table.add_row(str(row["dim"]), str(row["batch"]), *(f"{ms:.3f}" for ms in row["ms"].values()))
    console.print(table)
    console.print(result["machine"])
    (out / "verify.json").write_text(json.dumps(result, indent=1) + "\n")
    plots.drafts(result, out / "verify.png")
    over = [row for row in result["rows"] if _misses(row["ms"])]
    if check and over:
        console.print(f"over the limits: {over}")
        raise typer.Exit(1)


def _misses(ms: dict[str, float]) -> bool:
    """Whether a limit is missed."""
    beaten = all(ms["rejection"] < ms[peer] for peer in DRAFTS_PEERS if peer in ms)
    return ms["match"] > LIMIT * ms["sample"] or not beaten


if __name__ == "__main__":
    typer.run(main)
