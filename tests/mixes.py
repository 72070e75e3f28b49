"""Random mixes of everything that a request may ask for, and section 5 of the contract once more, token by token in
Python."""

import math
import random
from collections.abc import Collection
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flashsampling import noise
from flashsampling.inputs import SampleInputs
from flashsampling.outputs import SampleResult, layout
from flashsampling.sampling_params import SamplingParams

INF, NAN = math.inf, math.nan
# what a mix may set: hints, places of counts, scored tokens and the kept set are no parameters of a draw
FIELDS = set(SamplingParams._fields) - {"stream", "seen", "counts_rows", "scored_ids", "ranks", "kept_words"}


class Mix:
    """Draws rows of logits and what is asked of them. ``poisoned``: NaN, infinities and parameters out of their range
    too.

    ``wanted``: fields of ``SamplingParams`` that are asked for, of those before the filters and these; None: some.

    ``make(...)`` gives a step of logits; a kernel's test may give it hidden states instead.
    """

    def __init__(
        self,
        seed: int,
        poisoned: bool = True,
        device: torch.device | None = None,
        wanted: Collection[str] | None = None,
    ) -> None:
        self.random, self.poisoned, self.device = random.Random(seed), poisoned, device or torch.device("cpu")
        self.generator = torch.Generator().manual_seed(seed)
        self.wanted = wanted

    def one_in(self, n: int) -> bool:
        return self.random.randrange(n) == 0

    def wants(self, name: str, n: int) -> bool:
        return self.one_in(n) if self.wanted is None else name in self.wanted

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator)

    def pick(self, batch: int, usual: Any, rare: tuple[float, ...], integer: bool = False) -> Tensor | float:
        """A parameter: one number for all rows, or one per row."""
        values = [usual() if self.one_in(2) or not rare else self.random.choice(rare) for _ in range(batch)]
        if self.one_in(3) and not math.isnan(values[0]):
            return values[0]
        if not integer:
            return torch.tensor(values, dtype=torch.float32)
        return torch.tensor(values, dtype=torch.int64 if self.one_in(2) else torch.int32)

    def logits(self, batch: int, vocab: int) -> Tensor:
        rows = []
        for _ in range(batch):
            row = self.normal(vocab) * self.random.choice((0.1, 1.0, 3.0, 30.0))
            kind = self.random.randrange(8)
            if kind <= 1:
                row = (row * 2).round() / 2  # ties
            elif kind == 2:
                row = torch.full((vocab,), self.random.choice((0.0, -0.0, 5.5, -70.0)))
            elif kind == 3 and self.poisoned:
                row[self.random.randrange(vocab)] = self.random.choice((NAN, INF, -INF, 1e38, -1e38))
                row[self.random.randrange(vocab)] = self.random.choice((INF, -INF, -0.0, 0.0))
            rows.append(row)
        return torch.stack(rows)

    def mask(self, batch: int, vocab: int) -> Tensor:
        words = -(-vocab // 32) + self.random.randrange(2)
        mask = torch.zeros(batch, words, dtype=torch.int32)
        for row in mask:
            kind = self.random.randrange(6)
            if kind <= 1:
                row.copy_(torch.randint(-(2**31), 2**31, (words,), generator=self.generator))
            elif kind <= 3:
                row.fill_(-1)
            elif kind == 4:  # one token, or none that is one
                token = self.random.randrange(32 * words)
                row[token >> 5] = (1 << (token & 31)) - ((token & 31 == 31) << 32)
        return mask

    def counts(self, batch: int, vocab: int) -> Tensor:
        times = torch.randint(1, 5, (batch, vocab), generator=self.generator)
        times = torch.where(torch.rand(batch, vocab, generator=self.generator) < 0.05, 100_000, times)
        times = torch.where(torch.rand(batch, vocab, generator=self.generator) < 0.7, 0, times)
        in_prompt = torch.rand(batch, vocab, generator=self.generator) < 0.2
        return (times - (in_prompt.long() << 31)).to(torch.int32)

    def params(self, batch: int, vocab: int) -> SamplingParams:
        uniform, one_in, poisoned, wants = self.random.random, self.one_in, self.poisoned, self.wants
        params: dict[str, Any] = {}
        if wants("bias", 4):
            params["bias"] = self.normal(vocab)
        if wants("logit_scale", 4):
            params["logit_scale"] = self.random.choice((0.25, 3.0))
        if wants("soft_cap", 4):
            params["soft_cap"] = self.random.choice((2.0, 30.0))
        if wants("dense_bias", 4):
            is_special = torch.rand(vocab, generator=self.generator) < 0.1
            special = self.random.choice((-INF, 100.0, -100.0))
            params["dense_bias"] = torch.where(is_special, special, self.normal(vocab))
        if wants("bias_ids", 3):
            n = self.random.randrange(1, 6)
            ids = torch.randint(-2, vocab + 2, (batch, n), generator=self.generator, dtype=torch.int32)
            values = torch.tensor(
                [[self.random.choice((-INF, 100.0, -100.0, 1.5, uniform())) for _ in range(n)]] * batch
            )
            params |= {"bias_ids": ids, "bias_values": values}
        if wants("counts", 2):
            params["counts"] = self.counts(batch, vocab)
            params["repetition_penalty"] = self.pick(
                batch, lambda: 0.5 + uniform() * 2, (1.0,) + (NAN,) * (poisoned and one_in(9))
            )
            params["frequency_penalty"] = self.pick(batch, lambda: uniform() * 4 - 2, (0.0, 1e-4))
            params["presence_penalty"] = self.pick(batch, lambda: uniform() * 4 - 2, (0.0,))
        if wants("token_mask", 3):
            params["token_mask"] = self.mask(batch, vocab)
        if wants("top_k", 2):
            ends = (0, 1, 2, vocab - 1, vocab, vocab + 7, 2**31 - 1) + (-1, -(2**31)) * poisoned
            params["top_k"] = self.pick(batch, lambda: self.random.randrange(1, vocab + 1), ends, integer=True)
        filters: list[tuple[str, int, Any, tuple[float, ...], tuple[float, ...]]] = [
            ("top_p", 2, uniform, (0.0, 1e-30, 1e-7, 0.5, 1 - 6e-8, 1.0), (-1.0, 2.0, INF)),
            ("min_p", 3, lambda: uniform() ** 3, (0.0, 1e-30, 0.5, 1.0), (-1.0, 2.0)),
            ("epsilon_cutoff", 4, lambda: uniform() ** 3, (0.0, 1e-30, 1e-3, 0.5, 0.999), (-1.0, 2.0)),
            ("top_n_sigma", 4, lambda: uniform() * 4, (0.0, 1e-30, 1e30), (-1.0, INF)),
        ]
        for name, n, usual, reached, beyond in filters:
            if wants(name, n):
                params[name] = self.pick(batch, usual, reached + beyond * poisoned + (NAN,) * (poisoned and one_in(9)))
        if self.wanted is None:
            if one_in(2):
                params["logprobs"] = True
            if one_in(3):
                params["top_logprobs"] = self.random.randrange(1, min(vocab, 20) + 1)
            if one_in(3):
                shape = batch, self.random.randrange(4)
                params["logprob_ids"] = torch.randint(-2, vocab + 2, shape, generator=self.generator)
            if one_in(3):
                params["logsumexp"] = True
        return self._there(params | self._joint(batch, params))

    def _joint(self, batch: int, params: dict[str, Any]) -> dict[str, Any]:
        if not {"top_k", "top_p"} <= params.keys() or not self.wants("joint_top_p", 2):
            return {}
        of_all = self.pick(batch, lambda: self.random.randrange(2), (0, 1), integer=True)
        return {"joint_top_p": of_all.int() if isinstance(of_all, Tensor) else of_all}

    def _there(self, params: dict[str, Any]) -> SamplingParams:
        return SamplingParams(**{
            name: value.to(self.device) if isinstance(value, Tensor) else value for name, value in params.items()
        })  # fmt: skip

    def make(self, batch: int | None = None, vocab: int | None = None) -> SampleInputs:
        batch = batch or self.random.randrange(1, 9)
        vocab = vocab or self.random.choice((1, 2, 5, 31, 32, 33, 64, 70, 130))
        columns = vocab + self.random.choice((0, 0, 3))
        logits = self.logits(batch, columns)
        if columns > vocab:
            logits[:, vocab:] = self.random.choice((NAN, 1e9))  # padding, never to be seen
        usual = (0.0, 1.0, 1e-6) + (INF, NAN) * (self.poisoned and self.one_in(6))
        temperature = self.pick(batch, lambda: self.random.random() * 2 + 0.05, usual)
        bits = [torch.randint(-(2**63), 2**63 - 1, (batch,), generator=self.generator) for _ in range(2)]
        if isinstance(temperature, Tensor):
            temperature = temperature.to(self.device)
        logits, seed, offset = (part.to(self.device) for part in (logits, *bits))
        num_samples = self.random.choice((1, 1, 1, 2, 5))
        params = self.params(batch, vocab)
        return SampleInputs(logits, logits, temperature, seed, offset, num_samples, vocab, params=params, logits=logits)

    def of_a_head(self, step: SampleInputs) -> SampleInputs:
        """The step with a head in place of its logits: small multiples of 1/4, so that any order of sums is exact; and
        ties."""
        columns, dim = step.hidden_states.shape[1], 8
        states, weight = (
            torch.randint(-4, 5, shape, generator=self.generator).float().to(self.device)
            for shape in ((len(step.hidden_states), dim), (columns, dim))
        )
        weight /= 4
        if self.poisoned and self.one_in(4):
            states[self.random.randrange(len(states)), 0] = self.random.choice((NAN, INF))
        return step._replace(hidden_states=states, weight=weight, logits=None)


def at(value: Any, row: int) -> Any:
    """A row's own, as Python has it."""
    return value[row].tolist() if isinstance(value, Tensor) else value


def rounded(value: float) -> float:
    """A number as float32."""
    return float(np.float32(value))


def word_by_word(step: SampleInputs) -> SampleResult:
    """Section 5, one row and one token after another. Single operations are fp32 where the contract says so, sums
    exact."""
    step = step._replace(params=step.params.rows(0, len(step.hidden_states)))
    batch, vocab, params = len(step.hidden_states), step.vocab_size, step.params
    rows = step.rows()
    draws = torch.arange(step.num_samples)
    gumbel = noise.gumbel(rows.seed, rows.offset, draws, 0, vocab, params.stream).numpy()
    assert step.logits is not None
    outs = []
    for row in range(batch):
        outs.append(_row(step.logits[row, :vocab].float().numpy(), row, step, gumbel[row]))
    there = layout(batch, step.num_samples, params)
    parts = {}
    for name in [*there.ids, *there.values]:
        dtype = torch.int64 if name in there.ids else torch.float32
        parts[name] = torch.tensor([out[name] for out in outs], dtype=dtype).view(batch, -1)
    return there.join(parts)


def probabilities_of(step: SampleInputs) -> tuple[int, list[float] | None]:
    """Of a step of one row and draw: the token, and what ``sample`` draws each one with; None: there is no token."""
    assert step.logits is not None
    rows, draw = step.rows(), torch.zeros(1, dtype=torch.int64)
    gumbel = noise.gumbel(rows.seed, rows.offset, draw, 0, step.vocab_size)[0].numpy()
    there = _row(step.logits[0, : step.vocab_size].float().numpy(), 0, step, gumbel)
    (token,) = there["token_ids"]
    if token < 0:
        return token, None
    if rounded(at(step.temperature, 0)) < rounded(1e-6):
        return token, [float(other == token) for other in range(step.vocab_size)]
    return token, [there["probabilities"].get(other, 0.0) for other in range(step.vocab_size)]


@np.errstate(all="ignore")
def _row(raw: np.ndarray, row: int, step: SampleInputs, gumbel: np.ndarray) -> dict[str, Any]:
    f: Any = np.float32
    params: Any = step.params
    vocab = step.vocab_size
    raw = raw.copy()
    for token in range(vocab):
        if params.bias is not None:
            raw[token] += f(params.bias[token])
        if params.logit_scale != 1:
            raw[token] *= f(params.logit_scale)
    if params.soft_cap:
        raw = f(params.soft_cap) * torch.tanh(torch.from_numpy(raw / f(params.soft_cap))).numpy()
    logits, there = raw.copy(), [True] * vocab
    repetition, frequency, presence = (
        f(at(value, row)) for value in (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
    )
    for token in range(vocab):
        if params.dense_bias is not None:
            logits[token] += f(params.dense_bias[token])
        if params.bias_ids is not None:
            total = f(0)
            for other, value in zip(params.bias_ids[row].tolist(), params.bias_values[row].tolist()):
                if other == token:
                    total += f(value)
            logits[token] += total
        if params.counts is not None:
            word = int(params.counts[row, token]) & 0xFFFFFFFF
            count = word & 0x7FFFFFFF
            if word:
                logits[token] = logits[token] / repetition if logits[token] > 0 else logits[token] * repetition
            if count:
                logits[token] = logits[token] - frequency * f(count) - presence
        if params.token_mask is not None and not int(params.token_mask[row, token // 32]) >> token % 32 & 1:
            there[token] = False
            logits[token] = f(-INF)

    temperature = rounded(at(step.temperature, row))
    greedy = temperature < rounded(1e-6)
    scale = 1.0 if greedy else temperature
    order = sorted(range(vocab), key=lambda token: (-float(logits[token]), token))
    best = float(logits[order[0]])
    above = [_relative(float(logits[token]), best, scale) for token in range(vocab)]
    if best == INF:  # the first of them alone has probability
        above = [value if token == order[0] or logits[token] != best else -INF for token, value in enumerate(above)]
    top_k, top_p, min_p = int(at(params.top_k, row)), rounded(at(params.top_p, row)), rounded(at(params.min_p, row))
    epsilon, sigmas = rounded(at(params.epsilon_cutoff, row)), rounded(at(params.top_n_sigma, row))
    if sigmas > 0:
        finite = [float(value) for value in logits if math.isfinite(value)]
        mean = math.fsum(finite) / max(len(finite), 1)
        sigma = math.sqrt(math.fsum((value - mean) ** 2 for value in finite) / max(len(finite), 1))
        least = rounded(best - min(sigmas, 3e38) * sigma)
        order = [token for token in order if float(logits[token]) >= least] or order[:1]
    kept = order[:top_k] if 0 < top_k < vocab else list(order)
    if top_p < 1:
        masses = [math.exp(above[token]) for token in kept]
        of_all = bool(at(params.joint_top_p, row))
        total, before = math.fsum([math.exp(above[token]) for token in order] if of_all else masses), 0
        while before < len(kept) and (before == 0 or math.fsum(masses[:before]) < top_p * total):
            before += 1
        kept = kept[:before]
    if min_p > 0:
        kept = [token for token in kept if math.exp(above[token]) >= min_p] or kept[:1]
    if epsilon > 0:
        total = math.fsum(math.exp(above[token]) for token in kept)
        kept = [t for t in kept if math.exp(above[t]) >= min(epsilon * total, 1.0)] or kept[:1]
    kept = [token for token in kept if there[token]]

    token_ids = []
    factor = f(0) if greedy else min(f(temperature), f(1))
    for noise_of in gumbel:
        divisor = f(1) if greedy else np.maximum(f(temperature), f(1))
        scores = [f(logits[t] / divisor + factor * noise_of[t]) if there[t] else f(-INF) for t in range(vocab)]
        defined = any(map(math.isfinite, scores)) and not any(
            map(math.isnan, [*scores, top_p, min_p, epsilon, sigmas, temperature])
        )
        token_ids.append(max(kept, key=lambda token: (scores[token], -token)) if defined else -1)

    raw64 = [float(value) for value in raw]
    lse = _logsumexp(raw64)
    kept_lse = _logsumexp([above[token] for token in kept])
    raw_logprobs = [value - lse for value in raw64]
    by_raw = sorted(range(vocab), key=lambda token: (-raw64[token], token))
    top = [-1 if any(map(math.isnan, raw64)) else token for token in by_raw[: params.top_logprobs]]
    ids = params.logprob_ids[row].tolist() if params.logprob_ids is not None else []

    def logprob(token: int) -> float:
        return raw_logprobs[token] if 0 <= token < vocab else NAN

    return {
        "probabilities": {token: math.exp(above[token] - kept_lse) for token in kept},
        "token_ids": token_ids,
        "ranks": [-1 if t < 0 else 1 + sum(other > raw64[t] for other in raw64) for t in token_ids],
        "top_token_ids": top,
        "logprobs": [logprob(token) for token in token_ids],
        "processed_logprobs": [NAN if token < 0 else above[token] - kept_lse for token in token_ids],
        "top_logprobs": [logprob(token) for token in top],
        "given_logprobs": [logprob(token) for token in ids],
        "logsumexp": [lse],
    }


def _relative(logit: float, best: float, scale: float) -> float:
    """log(probability / the best one's): infinities as the contract has them."""
    if logit == best:
        return 0.0 if best != -INF else -INF
    if logit == -INF:
        return -INF
    difference = logit - best
    is_nan = math.isnan(difference) or math.isnan(scale)
    return NAN if is_nan else min(difference / scale, 0.0)  # above 0 beside a NaN alone


def _logsumexp(values: list[float]) -> float:
    highest = max(values, default=-INF)
    if any(map(math.isnan, values)) or math.isinf(highest):
        return NAN if any(map(math.isnan, values)) else highest
    return highest + math.log(math.fsum(math.exp(value - highest) for value in values))
