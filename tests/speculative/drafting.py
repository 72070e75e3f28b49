"""Drafts at random, and section 7 of the contract once more, one request and one draft after the other in Python."""

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from flashsampling import VerifyOutput, noise, verify, verify_from_logits
from flashsampling.inputs import SampleInputs
from flashsampling.reference import logit_transforms, oracle, rejection
from flashsampling.reference.logit_transforms import GREEDY_BELOW
from flashsampling.sampling_params import DEFAULT_PARAMS, FILTER_FIELDS, SamplingParams
from flashsampling.speculative.acceptance import RequestParams
from flashsampling.speculative.drafts import layout
from tests.mixes import INF, Mix, probabilities_of

BESIDE = {"logprobs": False, "top_logprobs": 0, "logprob_ids": None, "logsumexp": False}


@dataclass
class DraftChains:
    """B requests with up to n drafts each."""

    step: SampleInputs  # a row per request: parameters; its states are not used
    states: Tensor  # (B, n + 1, D), or logits (B, n + 1, V)
    weight: Tensor | None  # None: of logits
    ids: Tensor  # (B, n)
    parents: Tensor | None = None  # (B, n)
    probs: Tensor | None = None  # (B, n, V)
    masks: Tensor | None = None  # (B, n + 1, words)

    @property
    def lengths(self) -> list[int]:
        """Up to the last draft; ids before it may be no tokens."""
        return [max((i + 1 for i, token in enumerate(row) if token >= 0), default=0) for row in self.ids.tolist()]

    def request(self) -> dict[str, Any]:
        """As ``verify`` takes it: numbers that may be out of range as tensors, which are not looked at."""
        params, batch = self.step.params, len(self.ids)
        given: dict[str, Any] = {name: getattr(params, name) for name in params.names()}
        given = {
            name: torch.full((batch,), value, dtype=torch.int64 if name == "top_k" else torch.float32)
            if isinstance(value, (int, float)) and name in FILTER_FIELDS and name != "joint_top_p"
            else value
            for name, value in given.items()
        }
        if isinstance(given.get("joint_top_p"), int):
            given["joint_top_p"] = bool(given["joint_top_p"])
        if "bias" in given:  # a value for every row of the head, padding too
            padding = (self.states if self.weight is None else self.weight.T).shape[-1] - self.step.vocab_size
            given["bias"] = torch.nn.functional.pad(given["bias"], (0, padding), value=math.nan)
        if "bias_ids" in given:
            given["logit_bias"] = (given.pop("bias_ids"), given.pop("bias_values"))
        if "dense_bias" in given:
            given["logit_bias"] = given.pop("dense_bias")
        if "counts" in given:
            given["token_counts"] = given.pop("counts")
        if self.masks is not None:
            given["token_mask"] = self.masks
        return given

    def verify(
        self, method: str = "match", flat: bool = False, device: str | torch.device = "cpu", **others: Any
    ) -> VerifyOutput:
        """``device``: where it is done; what comes back is on the CPU."""
        rows = self.step.rows()
        options: dict[str, Any] = {"temperature": rows.temperature, "seed": rows.seed, "offset": rows.offset}
        options |= {"vocab_size": self.step.vocab_size, "method": method, **self.request(), **others}
        states, drafts = self.states, {"draft": self.ids, "parents": self.parents, "draft_probs": self.probs}
        if flat:
            lengths = self.lengths
            ends = [sum(lengths[:b]) for b in range(len(lengths) + 1)]
            states = torch.cat([row[: length + 1] for row, length in zip(states, lengths)])
            drafts = {
                name: None if value is None else torch.cat([row[:length] for row, length in zip(value, lengths)])
                for name, value in drafts.items()
            }
            if self.masks is not None:
                options["token_mask"] = torch.cat([row[: length + 1] for row, length in zip(self.masks, lengths)])
            options |= {"cu_draft_lengths": torch.tensor(ends), "max_draft_length": self.ids.shape[1]}
        ids = drafts.pop("draft")
        given = {"ids": ids, "states": states, "weight": self.weight, **drafts, **options}
        ids, states, weight, *_ = (given := tree_map_only(Tensor, lambda tensor: tensor.to(device), given)).values()
        rest = {name: value for name, value in given.items() if name not in ("ids", "states", "weight")}
        out = verify_from_logits(states, ids, **rest) if weight is None else verify(states, weight, ids, **rest)
        return VerifyOutput(*(None if part is None else part.cpu() for part in vars(out).values()))


def make_drafted(
    seed: int,
    method: str,
    tree: bool = False,
    poisoned: bool = True,
    head: bool = False,
    sizes: tuple[int, int, int] | None = None,  # B, n, V; None: some
    wanted: Collection[str] | None = None,
    device: str | torch.device = "cpu",
) -> DraftChains:
    """Logits as ``tests/mixes.py`` makes them, and what is wanted of them; drafts are likely tokens, any, or none; q
    likewise. On the CPU; ``device``: where what is accepted is found out."""
    mix = Mix(seed, poisoned, wanted=wanted)
    batch, n, vocab = sizes or (
        mix.random.randrange(1, 10),
        mix.random.randrange(8 if tree else 5),
        mix.random.choice((1, 2, 2, 5, 5, 5, 5, 33)),
    )
    step = mix.make(batch, vocab)
    params = step.params._replace(**BESIDE)
    if params.bias_ids is not None:
        params = params._replace(dense_bias=None)  # one argument takes either
    columns = step.hidden_states.shape[1]
    logits = mix.logits(batch * (n + 1), columns)
    if columns > vocab:
        logits[:, vocab:] = math.nan
    temperature = step.rows().temperature
    step = step._replace(params=params if params.names() else DEFAULT_PARAMS, num_samples=1, temperature=temperature)
    weight = None
    states = logits
    if head:
        whole = mix.of_a_head(step._replace(hidden_states=logits))
        states, weight = whole.hidden_states, whole.weight
        logits = states @ weight.T
    likely = logits[:, :vocab].nan_to_num(0.0).topk(min(vocab, 2)).indices
    drawn = torch.randint(
        -2 if mix.one_in(3) else 0, vocab + 2 * mix.one_in(4), (batch, n + 1), generator=mix.generator
    )
    pick = torch.randint(0, likely.shape[1], (batch, n + 1), generator=mix.generator)
    usual = likely.view(batch, n + 1, -1).gather(2, pick[:, :, None])[:, :, 0]
    ids = torch.where(torch.rand(batch, n + 1, generator=mix.generator) < 0.7, usual, drawn)[:, :n].contiguous()
    for row in ids:
        row[mix.random.randrange(n + 1) :] = -1
        if mix.one_in(2):
            row[mix.random.randrange(n + 1) :] = -1
    parents = None
    if tree:
        parents = (
            torch.tensor([[mix.random.randrange(-1, j) for j in range(n)] for _ in range(batch)]).view(batch, n).long()
        )
        if mix.one_in(5) and n:
            parents[mix.random.randrange(batch), mix.random.randrange(n)] = mix.random.choice((-2, n, 2**40, -(2**40)))
    probs = None
    if method == "rejection" and not mix.one_in(4):
        q = torch.softmax(mix.normal(batch * n, vocab + 1) * mix.random.choice((0.1, 1.0, 5.0)), dim=-1)
        q[:, :vocab] = torch.where(torch.rand(batch * n, vocab, generator=mix.generator) < 0.3, 0.0, q[:, :vocab])
        q = q.view(batch, n, vocab + 1)
        if mix.one_in(4):
            q = q.bfloat16()
        if mix.one_in(2):
            q = q[:, :, :vocab]
        if mix.poisoned and mix.one_in(6) and n:
            q[mix.random.randrange(batch), mix.random.randrange(n), mix.random.randrange(vocab)] = math.nan
        probs = q
    masks = None
    if step.params.token_mask is not None and mix.one_in(2):
        masks = mix.mask(batch * (n + 1), vocab).view(batch, n + 1, -1)
        without = step.params._replace(token_mask=None)
        step = step._replace(params=without if without.names() else DEFAULT_PARAMS)
    drafted = DraftChains(step, states.view(batch, n + 1, -1), weight, ids, parents, probs, masks)
    for _ in range(mix.random.randrange(6 if tree else 3)):
        _improve(drafted, method, device)
    return drafted


def _improve(drafted: DraftChains, method: str, device: str | torch.device) -> None:
    """One more draft of each request is what comes out, so that several in a row are accepted."""
    out = drafted.verify(method, device=device, impl="reference")
    for row, (count, length) in enumerate(zip(out.num_accepted.tolist(), drafted.lengths)):
        token, at = int(out.token_ids[row, count]), count
        if out.accepted_drafts is not None and drafted.parents is not None:
            last = int(out.accepted_drafts[row, count - 1]) if count else -1
            at = max((j for j in range(length) if int(drafted.parents[row, j]) == last < j), default=length)
        if at < length and token >= 0:
            drafted.ids[row, at] = token


def at_position(drafted: DraftChains, request: int, node: int, path: list[int]) -> SampleInputs:
    """The step of one request at one node, after the drafts ``path`` that lead to it."""
    step = drafted.step.part(request, request + 1)
    state = drafted.states[request, node][None]
    logits = state if drafted.weight is None else state @ drafted.weight.T
    params: SamplingParams = step.params
    if params.counts is not None:
        counts = params.counts.clone()
        for draft in path:
            token = int(drafted.ids[request, draft])
            if token < step.vocab_size:
                counts[0, token] += 1
        params = params._replace(counts=counts)
    if drafted.masks is not None:
        params = params._replace(token_mask=drafted.masks[request, node][None])
    rows = drafted.step.rows()
    # two's complement, as 64 bits wrap
    offset = rows.offset[request : request + 1] + len(path)
    return step._replace(
        hidden_states=logits,
        weight=logits,
        logits=logits,
        offset=offset,
        seed=rows.seed[request : request + 1],
        params=params,
    )


def coin_of(step: SampleInputs) -> float:
    rows = step.rows()
    seed, offset = int(rows.seed[0]) % 2**64, int(rows.offset[0]) % 2**64
    counter = (0, 1 << 24, offset % 2**32, offset >> 32)
    words = noise.philox4x32_10(
        tuple(torch.tensor([word]) for word in counter),  # type: ignore[arg-type]
        (torch.tensor([seed % 2**32]), torch.tensor([seed >> 32])),
    )
    return (int(words[0]) + 0.5) / 2**32


def one_by_one(drafted: DraftChains, request: int, method: str) -> tuple[list[int], list[int], float]:
    """The request's tokens, of which drafts they are but for the last, and how near a comparison was to going the other
    way."""
    vocab, ids, length = drafted.step.vocab_size, drafted.ids[request].tolist(), drafted.lengths[request]
    path: list[int] = []
    tokens: list[int] = []
    margin = math.inf
    while True:
        node = path[-1] + 1 if path else 0
        step = at_position(drafted, request, node, path)
        token, p = probabilities_of(step)
        if method == "match":
            tokens.append(token)
            if drafted.parents is None:
                children = [len(path)] if len(path) < length else []
            else:
                parents = drafted.parents[request].tolist()
                children = [j for j in range(length) if -1 <= parents[j] < j and parents[j] + 1 == node]
            follows = next((j for j in children if ids[j] == token >= 0), None)
            if follows is None:
                return tokens, path, margin
            path.append(follows)
            continue
        if node == length or not 0 <= ids[node] < vocab:
            tokens.append(token)
            return tokens, path, margin
        x = ids[node]
        q = [float(token == x) for token in range(vocab)]
        if drafted.probs is not None:
            q = drafted.probs[request, node, :vocab].tolist()
        held, limit = coin_of(step) * q[x], p[x] if p is not None else 0.0
        if held != limit:
            margin = min(margin, abs(held - limit) / max(abs(held), abs(limit)))
        if held < limit:
            tokens.append(x)
            path.append(node)
            continue
        token = -1
        if p is not None and not any(map(math.isnan, q)):
            left = [max(mine - theirs, 0.0) for mine, theirs in zip(p, q)]
            left = left if any(left) else p
            rows = step.rows()
            gumbel = noise.gumbel(rows.seed, rows.offset, torch.zeros(1).long(), 0, vocab, noise.Stream.RECOVERY)[
                0, 0
            ].tolist()
            scores = [math.log(mass) + g if mass else -math.inf for mass, g in zip(left, gumbel)]
            token = scores.index(max(scores))
        tokens.append(token)
        return tokens, path, margin


# -- where float32 may come to something else


def sure_of(drafted: DraftChains, expected: VerifyOutput, tolerance: float = 2e-5) -> Tensor:
    """(B,) bool: no comparison by which rejection came to ``expected`` is so near that a probability, an edge of a
    filter or a score that is wrong by ``tolerance``, relatively, may turn it round; or by up to 1e-3, where logits are
    large and the temperature is low: a last bit counts for more there. float64, all requests at once, chains."""
    given, states = layout("hidden_states", drafted.states, drafted.ids, None, None, None)
    drafts, (batch, n) = given.drafts(), drafted.ids.shape
    of_requests, vocab = drafted.step.rows(), drafted.step.vocab_size
    masks = None if drafted.masks is None else drafted.masks.flatten(0, 1)
    rows, params = RequestParams(*of_requests, drafted.step.params, masks).at(drafts.nodes(), drafts, vocab)
    product = (states if drafted.weight is None else states @ drafted.weight.T)[:, :vocab].float()
    step = SampleInputs(product, product, **rows, num_samples=1, vocab_size=vocab, params=params, logits=product)
    of_rows = step.rows()

    def probabilities(params: SamplingParams) -> tuple[oracle.Logits, Tensor]:
        logits = oracle.transform_logits(product, of_rows.temperature, params)
        return logits, rejection.probabilities(logits, step._replace(params=params))

    logits, p = probabilities(params)
    greedy = of_rows.temperature < GREEDY_BELOW
    largest = logits.processed.abs().nan_to_num(0.0, 0.0).amax(dim=1).double() / torch.where(
        greedy, 1.0, of_rows.temperature
    )
    error = (tolerance + 2.0**-22 * largest.nan_to_num(0.0)).clamp(max=1e-3)
    clear = _is_clear(product, params)
    for sign in (-1, 1):
        nudged = {
            name: _nudged(getattr(params, name), 1 + sign * error) for name in ("top_p", "min_p", "epsilon_cutoff")
        }
        nudged["top_n_sigma"] = _nudged(params.top_n_sigma, 1 + sign * error, INF)
        clear = clear & ((probabilities(params._replace(**nudged))[1] > 0) == (p > 0)).all(dim=1)
    scores = oracle.token_scores(logits, step, torch.zeros(1, dtype=torch.int64))[:, 0].double()
    scores = scores if logits.kept is None else scores.masked_fill(~logits.kept, -math.inf)
    best = scores.amax(dim=1, keepdim=True)
    others = torch.where((scores == best) & greedy[:, None], -math.inf, scores)  # equal ones: the lowest id, to the bit
    second = others.sort(dim=1, descending=True).values
    second = torch.nn.functional.pad(second, (0, 1), value=-math.inf)
    second = torch.where(greedy, second[:, 0], second[:, 1])
    drawn = ~(best[:, 0] - second <= error * (1 + best[:, 0].abs()))  # NaN and equal infinities are what they are
    clear = clear & (drawn | ~greedy)

    # every draft's coin, and what takes the place of a draft
    p, clear, drawn = p.view(batch, n + 1, vocab), clear.view(batch, n + 1), drawn.view(batch, n + 1)
    error = error.view(batch, n + 1)
    ids = torch.nn.functional.pad(drafts.token_ids, (0, 1), value=-1)
    there = (ids >= 0) & (ids < vocab)
    places = torch.where(there, ids, 0)[:, :, None]
    q = torch.zeros_like(p).scatter_(2, places, there[:, :, None].double())
    if drafted.probs is not None:
        q[:, :n] = drafted.probs[:, :, :vocab].double()
    held = noise.coin(of_rows.seed, of_rows.offset).view(batch, n + 1) * q.gather(2, places)[:, :, 0]
    wanted = p.gather(2, places)[:, :, 0]
    size = torch.maximum(held, wanted)
    near = there & (((held - wanted).abs() <= error * size) & (size > 0) | (wanted < 1e-37) & (wanted > 0))
    left = p - q
    none_left = (left <= 0).all(dim=2, keepdim=True)
    left = torch.where(none_left, p, left)
    # where q is as much as p but for rounding, nobody knows what is left
    wrong = error[:, :, None] * p
    low, high = (left - wrong).clamp(min=0), torch.where(p > 0, left + wrong, 0.0).clamp(min=0)
    if drafted.probs is None:
        low, high = (torch.where(q > 0, 0.0, bound) for bound in (low, high))
    gumbel = noise.gumbel(
        of_rows.seed, of_rows.offset, torch.zeros(1, dtype=torch.int64), 0, vocab, noise.Stream.RECOVERY
    )
    gumbel = gumbel[:, 0].double().view(batch, n + 1, vocab)
    first = (left.log() + gumbel).nan_to_num(-math.inf).argmax(dim=2, keepdim=True)
    above = (high.log() + gumbel).scatter(2, first, -math.inf).amax(dim=2)
    below = (low.log() + gumbel).gather(2, first)[:, :, 0]
    recovered = (below - above > error * (1 + below.abs())) | (p + q).isnan().any(dim=2)

    last = expected.num_accepted[:, None]
    node = torch.arange(n + 1)
    visited = node <= last
    is_refused = there.gather(1, last)[:, 0]
    at_end = torch.where(is_refused, recovered.gather(1, last)[:, 0], drawn.gather(1, last)[:, 0])
    return at_end & ((clear & ~near) | ~visited).all(dim=1)


def _nudged(limit: Tensor | float, factor: Tensor, off: float = 1.0) -> Tensor:
    """A filter's edge in every row; one that is off stays off."""
    limits = limit if isinstance(limit, Tensor) else torch.full(factor.shape, limit)
    return torch.where(limits < off, limits * factor, limits).float()


def _is_clear(product: Tensor, params: SamplingParams) -> Tensor:
    """(R,) bool: a soft cap keeps apart what it is of, or makes the largest number of both."""
    if not params.soft_cap:
        return torch.ones(len(product), dtype=torch.bool)
    bare = logit_transforms.raw(product, params._replace(soft_cap=0.0)).double().sort(dim=1).values / params.soft_cap
    capped = torch.tanh(bare)
    apart = (capped[:, 1:] - capped[:, :-1] > 1e-6) | (bare[:, 1:] == bare[:, :-1])
    same = (bare[:, 1:].abs() > 9.5) & (bare[:, :-1].abs() > 9.5)
    return (apart | same | bare[:, 1:].isnan()).all(dim=1)
