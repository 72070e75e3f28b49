"""How drafts are accepted: by the tokens that the target draws, or by rejection."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import ops
from .api import SampleOutput, check_kind
from .drafts import Accepted, Drafts, Nodes
from .noise import Stream
from .requests import Problem, Request, asked_of
from .step import ARGUMENTS, Asked, Step, arguments

METHODS = ("match", "rejection")
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


class Verified(NamedTuple):
    """As ``VerifyOutput``."""

    token_ids: Tensor
    num_accepted: Tensor
    num_emitted: Tensor
    accepted_drafts: Tensor | None


class Target(NamedTuple):
    """What draws."""

    states: Tensor  # (R, D), or logits (R, V)
    weight: Tensor | None  # None: of logits
    vocab: int
    vocab_size: int
    draw: Callable[..., SampleOutput]  # of rows of states, by sample's keywords


class Parameters(NamedTuple):
    """Of all requests."""

    temperature: Tensor | float
    seed: Tensor | int
    offset: Tensor | int
    asked: Asked
    masks: Tensor | None  # (R, words): of every position

    def at(self, nodes: Nodes, drafts: Drafts, vocab_size: int) -> tuple[dict[str, Any], Asked]:
        """Of some positions."""

        def each(value: Any) -> Any:
            return value.index_select(0, nodes.request) if isinstance(value, Tensor) else value

        rows = {"temperature": each(self.temperature), "seed": each(self.seed), "offset": each(self.offset) + nodes.depth}
        asked = self.asked
        if (names := asked.names()) or self.masks is not None:
            values = {name: each(getattr(asked, name)) for name in names if name not in ("bias", "dense_bias", "counts")}
            if asked.counts is not None:
                values["counts"] = drafts.counts(asked.counts, nodes, vocab_size)
            if self.masks is not None:
                values["token_mask"] = self.masks.index_select(0, nodes.row)
            asked = asked._replace(**values)
        return rows, asked


def match(target: Target, drafts: Drafts, parameters: Parameters, _: Tensor | None) -> Verified:
    """Drafts that are what ``sample`` draws at their position, with the request's own noise."""
    rows, asked = parameters.at(drafts.nodes(), drafts, target.vocab_size)
    tokens = target.draw(target.states, **rows, **_request(asked)).token_ids[drafts.rows]
    accepted = drafts.matched(tokens)
    return _output(drafts, accepted, torch.where(accepted.nodes < 0, -1, tokens.gather(1, accepted.nodes.clamp(min=0))))


def reject(target: Target, drafts: Drafts, parameters: Parameters, draft_probs: Tensor | None) -> Verified:
    """Drafts that a coin accepts, and what ``impl/rejection`` draws instead of the first that it does not."""

    def step_at(nodes: Nodes, stream: Stream) -> Step:
        rows, asked = parameters.at(nodes, drafts, target.vocab_size)
        states, weight = target.states.index_select(0, nodes.row), target.weight
        head, logits = (states, states) if weight is None else (weight, None)
        asked = asked._replace(stream=stream)
        return Step(states, head, **rows, num_samples=1, vocab_size=target.vocab_size, asked=asked, logits=logits)

    ids = torch.nn.functional.pad(drafts.token_ids, (0, 1), value=-1)
    places = torch.nn.functional.pad(drafts.places(), (0, 1))
    before, there = drafts.predecessors(), drafts.token_ids >= 0
    held = ids.flatten()[before.request * ids.shape[1] + before.node]
    step = step_at(before, Stream.ACCEPTANCE_COIN)
    accepted = drafts.up_to(there & ops.accept(step, held, draft_probs)[places[:, :-1]] if len(held) else there)
    last = accepted.num_accepted[:, None]
    nodes = drafts.ends(last[:, 0])
    refused, place = ids.gather(1, last)[:, 0], places.gather(1, last)[:, 0]
    step = step_at(nodes, Stream.RECOVERY)
    rows = {"temperature": step.temperature, "seed": step.seed, "offset": step.offset}
    bonus = target.draw(step.hidden_states, **rows, **_request(step.asked._replace(stream=Stream.TOKEN))).token_ids
    tokens = torch.where(refused < 0, bonus, ops.recover(step, refused, draft_probs, place)) if len(held) else bonus
    return _output(drafts, accepted, ids.masked_fill(accepted.nodes < 0, -1).scatter(1, last, tokens[:, None]))


def _output(drafts: Drafts, accepted: Accepted, token_ids: Tensor) -> Verified:
    """``token_ids``: accepted drafts and what comes next."""
    count, nodes = accepted
    there = token_ids.gather(1, count[:, None])[:, 0] >= 0
    path = None if drafts.tree is None else (nodes[:, 1:] - 1).clamp(min=-1)
    return Verified(token_ids, count, count + there, path)


# -- arguments


def check_draft_probs(draft_probs: Any, method: str, target: Target, drafts: Drafts) -> Tensor | None:
    """(N, V or more)."""
    if method == "rejection" and drafts.tree is not None:
        raise ValueError("parents must be None with method='rejection', which knows chains alone")
    if draft_probs is None:
        return None
    if method != "rejection":
        raise ValueError(f"draft_probs must be None with method={method!r}, which does not need it")
    check_kind("draft_probs", draft_probs)
    if draft_probs.dtype not in _FLOATS:
        raise TypeError(f"draft_probs must be float32, bfloat16 or float16, got {draft_probs.dtype}")
    if draft_probs.device != target.states.device:
        raise ValueError(f"draft_probs must be on the device of the step, {target.states.device}, got {draft_probs.device}")
    shape = (len(target.states) - len(drafts.rows),) if drafts.bounds is not None else tuple(drafts.token_ids.shape)
    if draft_probs.shape[:-1] != shape or draft_probs.shape[-1] < target.vocab_size:
        wanted = f"({', '.join(map(str, shape))}, {target.vocab_size})"
        raise ValueError(f"draft_probs must have shape {wanted}, got shape {tuple(draft_probs.shape)}")
    return draft_probs.flatten(0, -2)


def asked_at(request: Request, target: Target, drafts: Drafts) -> tuple[Asked, Tensor | None]:
    """What is asked for, a row per request, and masks of every position if there are such."""
    positions, batch, device = len(target.states), len(drafts.rows), target.states.device
    request, masks = request.copy(), None
    mask = request.get("token_mask")
    if isinstance(mask, Tensor) and (mask.ndim == 3 or (mask.ndim == 2 and len(mask) == positions != batch)):
        if mask.shape[:-1] not in ((batch, positions // max(batch, 1)), (positions,)) or (drafts.bounds is not None) != (
            mask.ndim == 2
        ):
            raise ValueError(f"token_mask must have a row per request or per position, got shape {tuple(mask.shape)}")
        every = Problem(positions, target.vocab, target.vocab_size, device, 1)
        masks = asked_of({"token_mask": mask.flatten(0, -2)}, every).token_mask
        del request["token_mask"]
    asked = asked_of(request, Problem(batch, target.vocab, target.vocab_size, device, 1))
    beside = [name for name in asked.names() if name in ("logprobs", "top_logprobs", "logprob_ids", "logsumexp")]
    if beside:
        raise ValueError(f"{arguments(beside)} must be left out: verify returns token ids alone")
    return asked, masks


def _request(asked: Asked) -> dict[str, Any]:
    """As ``sample`` takes it."""
    request = {ARGUMENTS.get(name, name): getattr(asked, name) for name in asked.names()}
    if asked.bias_ids is not None:
        request["logit_bias"] = (asked.bias_ids, asked.bias_values)
    return request
