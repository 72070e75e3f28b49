"""Acceptance of drafts: if the target draws the same tokens (``match``), or by rejection sampling (``reject``)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from .. import ops
from ..backends import Backend, runs_small_kernels
from ..inputs import DraftChains, SampleInputs
from ..noise import Stream
from ..param_parsers import BatchShape
from ..row_params import is_plain
from ..sampling import check_kind
from ..sampling_params import (
    DEFAULT_PARAMS,
    MATRIX_FIELDS,
    OUTPUT_FIELDS,
    ROW_FIELDS,
    SamplingOptions,
    SamplingParams,
    argument_names,
    parse_sampling_params,
)
from ..torch_internals import register_dataclass
from .drafts import Accepted, DraftBatch, Drafts, Nodes

if TYPE_CHECKING:
    from ..tensor_parallel import TensorParallel

METHODS = ("match", "rejection")
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class VerifyOutput:
    """The output of ``verify``. A pytree, so exported and compiled modules may return it. Releases only add fields.

    Attributes:
        token_ids: (B, n + 1) int64: the request's next tokens, then -1. They are the accepted drafts, then one token
            that the target draws after them, in place of the first draft that is not accepted.
        num_accepted: (B,) int64: how many of them are drafts.
        num_emitted: (B,) int64: how many tokens there are: ``num_accepted + 1``, or ``num_accepted`` if the target has
            no token because its scores hold a NaN or no finite value.
        accepted_drafts: (B, n) int64, only for trees: the indices of the accepted drafts, in order, then -1; their rows
            of the target's key-value cache stay. None for chains, where they are the first ones.

    Example:
        >>> import torch, flashsampling
        >>> hidden_states, weight = torch.zeros(1, 3, 8), torch.zeros(1000, 8)
        >>> out = flashsampling.verify(hidden_states, weight, torch.tensor([[414, 7]]), seed=0)
        >>> out.token_ids, out.num_accepted, out.num_emitted
        (tensor([[414, 142,  -1]]), tensor([1]), tensor([2]))
    """

    token_ids: Tensor
    num_accepted: Tensor
    num_emitted: Tensor
    accepted_drafts: Tensor | None = None


register_dataclass(VerifyOutput, serialized_type_name="flashsampling.VerifyOutput")


class Target(NamedTuple):
    """The target model's LM head, or its logits."""

    states: Tensor  # (R, D), or logits (R, V)
    weight: Tensor | None  # None: the states are logits
    shape: BatchShape  # of the positions
    impl: str | None  # the backend; None: the first that can
    tp: "TensorParallel | None" = None  # the weight is its shard

    def inputs(self, states: Tensor, rows: dict[str, Any], params: SamplingParams) -> SampleInputs:
        """Returns a step of one draw for rows of states, with their temperature, seed and offset."""
        head, logits = (states, states) if self.weight is None else (self.weight, None)
        size = self.shape.vocab_size
        return SampleInputs(states, head, **rows, num_samples=1, vocab_size=size, params=params, logits=logits)


def _select(value: Any, request: Tensor) -> Any:
    """Returns a parameter of the requests (k,): a row for each, or the number for all."""
    return value.index_select(0, request) if isinstance(value, Tensor) else value


class RequestParams(NamedTuple):
    """The parameters of all requests."""

    temperature: Tensor | float
    seed: Tensor | int
    offset: Tensor | int
    params: SamplingParams
    masks: Tensor | None  # (R, words): a token mask for every position

    def at(self, nodes: Nodes, drafts: Drafts, vocab_size: int) -> tuple[dict[str, Any], SamplingParams]:
        """Returns the row parameters and sampling parameters of some positions."""
        temperature, seed, offset = (
            _select(value, nodes.request) for value in (self.temperature, self.seed, self.offset)
        )
        rows = {"temperature": temperature, "seed": seed, "offset": offset + nodes.depth}
        numbers = [_select(getattr(self.params, name), nodes.request) for name in ROW_FIELDS]
        masks = None if self.masks is None else self.masks.index_select(0, nodes.row)
        return rows, self.expand(numbers, nodes.request, masks, self.counts_at(nodes, drafts, vocab_size))

    def counts_at(self, nodes: Nodes, drafts: Drafts, vocab_size: int) -> Tensor | None:
        """Returns the token counts at some positions, which include the drafts before them."""
        counts = self.params.counts_of(nodes.request)
        return None if counts is None else drafts.counted(counts, nodes, vocab_size)

    def has_matrices(self) -> bool:
        """Returns whether a request may have parameters besides ``ROW_FIELDS``."""
        return self.masks is not None or any(getattr(self.params, name) is not None for name in MATRIX_FIELDS)

    def expand(
        self, numbers: Sequence[Any], request: Tensor | None, masks: Tensor | None, counts: Tensor | None
    ) -> SamplingParams:
        """Returns the sampling parameters of some positions, whose ``ROW_FIELDS`` are ``numbers``. ``request``: (k,),
        each position's; None if no request has matrices."""
        if self.params is DEFAULT_PARAMS and masks is None:
            return DEFAULT_PARAMS
        params = self.params._replace(**dict(zip(ROW_FIELDS, numbers)))
        if request is None:
            return params
        of_positions = {"token_mask": masks, "counts": counts}
        per_request = {
            name: _select(getattr(params, name), request) for name in MATRIX_FIELDS if of_positions.get(name) is None
        }
        # drafts add counts that ``seen`` misses
        return params._replace(**of_positions | per_request, seen=None, counts_rows=None)


def match(target: Target, given: DraftBatch, parameters: RequestParams, _: Tensor | None) -> VerifyOutput:
    """Accepts drafts that equal what ``sample`` draws at their position with the request's own noise."""
    if _runs_kernels(target.states, given):
        with torch.cuda.device_of(target.states):
            rows, params = _expand(target, given, parameters)
            return _verify_tokens_by_kernel(given, _draw(target, rows, params, lambda: hash_drafts(given)))
    drafts = given.drafts()
    rows, params = parameters.at(drafts.nodes(), drafts, target.shape.vocab_size)
    return _verify_tokens(drafts, _draw(target, rows, params, drafts.hash))


def verify_by_match(given: DraftBatch, tokens: Tensor) -> VerifyOutput:
    """Accepts drafts while they equal the tokens drawn at their positions, (R,): the second half of ``match``."""
    if _runs_kernels(tokens, given):
        return _verify_tokens_by_kernel(given, tokens)
    return _verify_tokens(given.drafts(), tokens)


def _verify_tokens(drafts: Drafts, tokens: Tensor) -> VerifyOutput:
    tokens = tokens[drafts.rows]
    accepted = drafts.matched(tokens)
    return _output(drafts, accepted, torch.where(accepted.nodes < 0, -1, tokens.gather(1, accepted.nodes.clamp(min=0))))


def _verify_tokens_by_kernel(given: DraftBatch, tokens: Tensor) -> VerifyOutput:
    from ..kernels.triton.speculative import draft_chains

    with torch.cuda.device_of(tokens):
        return VerifyOutput(*draft_chains.match(given.token_ids, *given[2:], tokens), None)


def hash_drafts(given: DraftBatch) -> Tensor:
    """Returns () int64: ``Drafts.hash``."""
    if not _runs_kernels(given.token_ids, given):
        return given.drafts().hash()
    from ..kernels.triton.speculative import draft_chains

    with torch.cuda.device_of(given.token_ids):
        return draft_chains.hashed(given.token_ids, *given[2:])


def _draw(target: Target, rows: dict[str, Any], params: SamplingParams, draft_hash: Callable[[], Tensor]) -> Tensor:
    """Returns (R,) int64: a token for every position; under tensor parallelism only if all ranks have the same
    drafts."""
    inputs = target.inputs(target.states, rows, params.normalized())
    if target.tp is None:
        return ops.sample(inputs, target.impl or "").ids
    return _draw_over_ranks(target.tp, inputs, draft_hash=draft_hash())


def _draw_over_ranks(tp: "TensorParallel", inputs: SampleInputs, **drafts: Any) -> Tensor:
    """Returns the ids of one step of the group. ``drafts``: the field of ``SampleInputs`` about drafts."""
    vocab_size, shard = tp.part
    return ops.sample_sharded(inputs._replace(vocab_size=vocab_size, shard=shard, **drafts), tp).ids


def _runs_kernels(states: Tensor, given: DraftBatch) -> bool:
    """Returns whether two small launches replace some thirty torch operations: for chains on a GPU, without a
    tracer."""
    return given.parents is None and given.batch > 0 and runs_small_kernels(states)


def _expand(target: Target, given: DraftBatch, parameters: RequestParams) -> tuple[dict[str, Any], SamplingParams]:
    """Returns ``RequestParams.at`` of all positions; a kernel expands what has one number per request."""
    from ..kernels.triton.speculative import draft_chains

    params, values = parameters.params, (parameters.temperature, parameters.seed, parameters.offset)
    *rows, numbers, request = draft_chains.expand(
        *given[2:],
        *values,
        [getattr(params, name) for name in ROW_FIELDS],
        target.states.device,
        positions=given.positions,
        with_requests=parameters.has_matrices(),
    )
    counts = None
    if params.counts is not None:
        drafts = given.drafts()
        counts = parameters.counts_at(drafts.nodes(), drafts, target.shape.vocab_size)
    expanded = parameters.expand(numbers, request, parameters.masks, counts)
    return dict(zip(("temperature", "seed", "offset"), rows)), expanded


def reject(target: Target, given: DraftBatch, parameters: RequestParams, draft_probs: Tensor | None) -> VerifyOutput:
    """Accepts drafts by a coin each, and draws in place of the first refused one as ``reference/rejection`` does."""
    if target.tp is not None:
        return _reject_over_ranks(target.tp, target, given, parameters, draft_probs)
    backend = _recording_backend(target, given, parameters)
    if backend is not None:
        return _reject_by_kernels(backend, target, given, parameters, draft_probs)
    drafts = given.drafts()

    def inputs_at(nodes: Nodes, stream: Stream) -> SampleInputs:
        rows, params = parameters.at(nodes, drafts, target.shape.vocab_size)
        return target.inputs(target.states.index_select(0, nodes.row), rows, params._replace(stream=stream))

    places, is_accepted = drafts.places(), drafts.token_ids >= 0
    has_drafts = given.token_ids.numel() > 0
    if has_drafts:
        inputs = inputs_at(drafts.predecessors(), Stream.ACCEPTANCE_COIN)
        coins = ops.reject("accept", inputs, drafts.token_ids.flatten(), draft_probs, places.flatten())
        is_accepted = is_accepted & coins.view_as(is_accepted)
    accepted = drafts.up_to(is_accepted)
    inputs = inputs_at(drafts.ends(accepted.num_accepted), Stream.RECOVERY)
    bonus = inputs._replace(params=inputs.params._replace(stream=Stream.TOKEN).normalized())
    tokens = ops.sample(bonus, target.impl or "").ids
    if has_drafts:
        last = accepted.num_accepted[:, None]
        refused = torch.nn.functional.pad(drafts.token_ids, (0, 1), value=-1).gather(1, last)[:, 0]
        place = torch.nn.functional.pad(places, (0, 1)).gather(1, last)[:, 0]
        was_refused = (refused >= 0) & (refused < target.shape.vocab_size)
        tokens = torch.where(was_refused, ops.reject("recover", inputs, refused, draft_probs, place), tokens)
    return _output_of_chains(drafts, accepted, tokens)


def _reject_over_ranks(
    tp: "TensorParallel", target: Target, given: DraftBatch, parameters: RequestParams, draft_probs: Tensor | None
) -> VerifyOutput:
    """Rejects as ``tensor_parallel/rejection`` does."""
    drafts = given.drafts()
    rows, params = parameters.at(drafts.nodes(), drafts, target.shape.vocab_size)
    probs = draft_probs if given.token_ids.numel() else None
    drafted = DraftChains(drafts.token_ids, drafts.rows, drafts.places(), probs)
    inputs = target.inputs(target.states, rows, params)
    tokens, num_accepted = _draw_over_ranks(tp, inputs, drafted=drafted).view(2, given.batch)
    return _output_of_chains(drafts, drafts.first(num_accepted), tokens)


def _recording_backend(target: Target, given: DraftBatch, parameters: RequestParams) -> Backend | None:
    """Returns the backend that draws, if it leaves what kernels reject by and they run here; None: torch rejects."""
    if not _runs_kernels(target.states, given):
        return None
    masks, params = parameters.masks, parameters.params
    rows = {"temperature": parameters.temperature, "seed": parameters.seed, "offset": parameters.offset}
    # parameters of requests serve the choice as well as those of positions; rejection needs the masses of
    # log-probabilities
    params = params._replace(logprobs=True, token_mask=params.token_mask if masks is None else masks)
    backend = ops.choose(target.inputs(target.states, rows, params), target.impl or "")
    return backend if backend.records else None


def _reject_by_kernels(
    backend: Backend, target: Target, given: DraftBatch, parameters: RequestParams, draft_probs: Tensor | None
) -> VerifyOutput:
    from ..kernels.triton.speculative import rejection

    with torch.cuda.device_of(target.states):
        inputs = target.inputs(target.states, *_expand(target, given, parameters))
        return VerifyOutput(
            *rejection.run(inputs, backend.recorded(inputs), given.token_ids, *given[2:], draft_probs), None
        )


def _output_of_chains(drafts: Drafts, accepted: Accepted, tokens: Tensor) -> VerifyOutput:
    """Returns the output. ``tokens``: (B,), the one after the accepted drafts."""
    ids = torch.nn.functional.pad(drafts.token_ids, (0, 1), value=-1).masked_fill(accepted.nodes < 0, -1)
    return _output(drafts, accepted, ids.scatter(1, accepted.num_accepted[:, None], tokens[:, None]))


def _output(drafts: Drafts, accepted: Accepted, token_ids: Tensor) -> VerifyOutput:
    """Returns the output. ``token_ids``: accepted drafts and the token after them."""
    count, nodes = accepted
    has_token = token_ids.gather(1, count[:, None])[:, 0] >= 0
    path = None if drafts.tree is None else (nodes[:, 1:] - 1).clamp(min=-1)
    return VerifyOutput(token_ids, count, count + has_token, path)


# -- arguments


def check_draft_probs(draft_probs: Any, method: str, target: Target, given: DraftBatch) -> Tensor | None:
    """Returns (N, V or more). Raises what ``verify`` documents."""
    if method == "rejection" and given.parents is not None:
        raise ValueError("parents must be None with method='rejection', which knows chains alone")
    if draft_probs is None:
        return None
    if method != "rejection":
        raise ValueError(f"draft_probs must be None with method={method!r}, which does not need it")
    check_kind("draft_probs", draft_probs)
    if draft_probs.dtype not in _FLOATS:
        raise TypeError(f"draft_probs must be float32, bfloat16 or float16, got {draft_probs.dtype}")
    if draft_probs.device != target.states.device:
        raise ValueError(
            f"draft_probs must be on the device of the step, {target.states.device}, got {draft_probs.device}"
        )
    shape = tuple(given.token_ids.shape)
    if draft_probs.shape[:-1] != shape or draft_probs.shape[-1] < target.shape.vocab_size:
        wanted = f"({', '.join(map(str, shape))}, {target.shape.vocab_size})"
        raise ValueError(f"draft_probs must have shape {wanted}, got shape {tuple(draft_probs.shape)}")
    return draft_probs.flatten(0, -2)


def parse_request_params(
    options: SamplingOptions, target: Target, given: DraftBatch, function: Callable[..., Any]
) -> tuple[SamplingParams, Tensor | None]:
    """Returns the sampling parameters, a row per request, and the token masks of every position if there are such.
    ``function``: whose arguments the options are."""
    positions, batch = target.shape.batch, given.batch
    options, masks = options.copy(), None
    mask = options.get("token_mask")
    if is_plain(mask) and (mask.ndim == 3 or (mask.ndim == 2 and mask.shape[0] == positions != batch)):
        is_flat = mask.ndim == 2
        if mask.shape[:-1] not in ((batch, given.n + 1), (positions,)) or (given.bounds is not None) != is_flat:
            raise ValueError(f"token_mask must have a row per request or per position, got shape {tuple(mask.shape)}")
        masks = parse_sampling_params({"token_mask": mask.flatten(0, -2)}, target.shape).token_mask
        del options["token_mask"]
    params = parse_sampling_params(options, target.shape._replace(batch=batch), function)
    if params.needs_raw_mass():
        outputs = [name for name in params.names() if name in OUTPUT_FIELDS]
        raise ValueError(f"{argument_names(outputs)} must be left out: verify returns token ids alone")
    return params, masks
