"""How drafts are accepted: by the tokens that the target draws, or by rejection."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from .. import ops
from ..backends import BACKENDS, Backend
from ..inputs import ARGUMENTS, DEFAULT_PARAMS, MATRICES, NUMBERS, DraftChains, SampleInputs, SamplingParams, arguments
from ..kernels.device import capability
from ..noise import Stream
from ..row_params import is_plain
from ..sampling import SampleOutput, check_kind, count_skipped_call, output_of
from ..sampling_params import BatchShape, Request, parse_sampling_params
from ..torch_internals import dispatch_modes, tracing_state
from .drafts import Accepted, DraftBatch, Drafts, Nodes

if TYPE_CHECKING:
    from typing_extensions import Unpack  # typing's from Python 3.11 on; torch brings this one

    from ..tensor_parallel import TensorParallel

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
    vocab: int  # as in ``requests.BatchShape``
    vocab_size: int
    draw: Callable[..., SampleOutput]  # of rows of states, by sample's keywords
    impl: str | None  # who draws; None: whoever can
    head: int | None = None  # as there
    tp: "TensorParallel | None" = None  # whose shard the weight is

    def step(self, states: Tensor, rows: dict[str, Any], params: SamplingParams) -> SampleInputs:
        """One draw of rows of states, by their temperature, seed and offset."""
        head, logits = (states, states) if self.weight is None else (self.weight, None)
        return SampleInputs(
            states, head, **rows, num_samples=1, vocab_size=self.vocab_size, params=params, logits=logits
        )


def _of(value: Any, request: Tensor) -> Any:
    """A parameter of requests (k,): a row each, or the number for all."""
    return value.index_select(0, request) if isinstance(value, Tensor) else value


class Parameters(NamedTuple):
    """Of all requests."""

    temperature: Tensor | float
    seed: Tensor | int
    offset: Tensor | int
    params: SamplingParams
    masks: Tensor | None  # (R, words): of every position

    def at(self, nodes: Nodes, drafts: Drafts, vocab_size: int) -> tuple[dict[str, Any], SamplingParams]:
        """Of some positions."""
        temperature, seed, offset = (_of(value, nodes.request) for value in (self.temperature, self.seed, self.offset))
        rows = {"temperature": temperature, "seed": seed, "offset": offset + nodes.depth}
        numbers = [_of(getattr(self.params, name), nodes.request) for name in NUMBERS]
        masks = None if self.masks is None else self.masks.index_select(0, nodes.row)
        return rows, self.asked_by(numbers, nodes.request, masks, self.counts_at(nodes, drafts, vocab_size))

    def counts_at(self, nodes: Nodes, drafts: Drafts, vocab_size: int) -> Tensor | None:
        """Of some positions, the drafts before them counted too."""
        return None if self.params.counts is None else drafts.counts(self.params.counts, nodes, vocab_size)

    def has_matrices(self) -> bool:
        """Whether a request may have more than ``step.NUMBERS``."""
        return self.masks is not None or any(getattr(self.params, name) is not None for name in MATRICES)

    def asked_by(
        self, numbers: Sequence[Any], request: Tensor | None, masks: Tensor | None, counts: Tensor | None
    ) -> SamplingParams:
        """What requests ask for at some positions: ``numbers`` (``step.NUMBERS``), masks and counts are of these already.
        ``request`` (k,): whose they are; None if nobody has matrices."""
        if self.params is DEFAULT_PARAMS and masks is None:
            return DEFAULT_PARAMS
        params = self.params._replace(**dict(zip(NUMBERS, numbers)))
        if request is None:
            return params
        of_positions = {"token_mask": masks, "counts": counts}
        per_request = {name: _of(getattr(params, name), request) for name in MATRICES if of_positions.get(name) is None}
        return params._replace(**of_positions | per_request, seen=None)  # of drafts there are more


def match(target: Target, given: DraftBatch, parameters: Parameters, _: Tensor | None) -> Verified:
    """Drafts that are what ``sample`` draws at their position, with the request's own noise."""
    if _by_kernels(target.states, given):
        return _match_by_kernels(target, given, parameters)
    drafts = given.drafts()
    rows, params = parameters.at(drafts.nodes(), drafts, target.vocab_size)
    return _held(drafts, _drawn(target, rows, params, drafts.hash))


def sample_with_draft_hash(
    tp: "TensorParallel",
    given: DraftBatch,
    hidden_states: Tensor,  # (R, D), of every position
    weight: Tensor,  # (V_shard, D)
    *,
    temperature: Tensor,  # (R,) float32
    seed: Tensor,  # (R,) int64
    offset: Tensor,  # (R,) int64
    **request: "Unpack[Request]",
) -> SampleOutput:
    """The first half of ``match``, of several ranks: ``sample`` of every position, for those who ask of one what ``verify`` has
    not. Ranks whose drafts differ get no token, and the error that ``sample`` documents: they would accept so many each."""
    try:
        positions = len(hidden_states)
        params = DEFAULT_PARAMS
        if request:
            problem = BatchShape(positions, tp.num_rows, tp.vocab_size, hidden_states.device, 1, len(weight))
            params = parse_sampling_params(request, problem)
        vocab_size, shard = tp.part
        step = SampleInputs(
            hidden_states, weight, temperature, seed, offset, 1, vocab_size, shard, params, draft_hash=_hashed(given)
        )
        drawn = ops.sample_sharded(step, tp)
    except BaseException as error:
        count_skipped_call(tp, error)
        raise
    return output_of(drawn, positions, 1, params, None)


def held(given: DraftBatch, tokens: Tensor) -> Verified:
    """The second half of ``match``: drafts while they are what was drawn at their positions, ``tokens`` (R,)."""
    return _held_by_kernel(given, tokens) if _by_kernels(tokens, given) else _held(given.drafts(), tokens)


def _held(drafts: Drafts, tokens: Tensor) -> Verified:
    tokens = tokens[drafts.rows]
    accepted = drafts.matched(tokens)
    return _output(drafts, accepted, torch.where(accepted.nodes < 0, -1, tokens.gather(1, accepted.nodes.clamp(min=0))))


def _hashed(given: DraftBatch) -> Tensor:
    """() int64: ``drafts.Drafts.hash``."""
    if not _by_kernels(given.token_ids, given):
        return given.drafts().hash()
    from ..kernels.triton.speculative import draft_chains

    with torch.cuda.device_of(given.token_ids):
        return draft_chains.hashed(given.token_ids, *given[2:])


def _held_by_kernel(given: DraftBatch, tokens: Tensor) -> Verified:
    from ..kernels.triton.speculative import draft_chains

    with torch.cuda.device_of(tokens):
        return Verified(*draft_chains.match(given.token_ids, *given[2:], tokens), None)


def _drawn(target: Target, rows: dict[str, Any], params: SamplingParams, hashed: Callable[[], Tensor]) -> Tensor:
    """(R,) int64: a token of every position; of several ranks only if they have the same drafts, ``hashed``."""
    if target.tp is None:
        return target.draw(target.states, **rows, **_request(params)).token_ids
    return _drawn_over_ranks(target.tp, target, rows, params, draft_hash=hashed())


def _drawn_over_ranks(
    tp: "TensorParallel", target: Target, rows: dict[str, Any], params: SamplingParams, **drafts: Any
) -> Tensor:
    """Ids of one step of the group, a row per position; ``drafts``: the step's field for them."""
    vocab_size, shard = tp.part
    step = target.step(target.states, rows, params)._replace(vocab_size=vocab_size, shard=shard, **drafts)
    return ops.sample_sharded(step, tp).ids


def _by_kernels(states: Tensor, given: DraftBatch) -> bool:
    """Whether two small launches do what else takes some thirty: chains on a GPU, where no compiler looks."""
    return (
        states.is_cuda
        and given.parents is None
        and given.batch > 0
        and BACKENDS["triton"].missing is None
        and capability(states.device) >= (8, 0)
        and not torch.compiler.is_compiling()
        and tracing_state() is None
        and not dispatch_modes()
    )


def _match_by_kernels(target: Target, given: DraftBatch, parameters: Parameters) -> Verified:
    with torch.cuda.device_of(target.states):
        rows, params = _expand(target, given, parameters)
        tokens = _drawn(target, rows, params, lambda: _hashed(given))
        return _held_by_kernel(given, tokens)


def _expand(target: Target, given: DraftBatch, parameters: Parameters) -> tuple[dict[str, Any], SamplingParams]:
    """``Parameters.at`` of all positions, by a kernel, but for what has more than a number per request."""
    from ..kernels.triton.speculative import draft_chains

    params, values = parameters.params, (parameters.temperature, parameters.seed, parameters.offset)
    *rows, numbers, request = draft_chains.expand(
        *given[2:],
        *values,
        [getattr(params, name) for name in NUMBERS],
        target.states.device,
        positions=given.positions,
        with_requests=parameters.has_matrices(),
    )
    counts = None
    if params.counts is not None:
        drafts = given.drafts()
        counts = parameters.counts_at(drafts.nodes(), drafts, target.vocab_size)
    return dict(zip(("temperature", "seed", "offset"), rows)), parameters.asked_by(
        numbers, request, parameters.masks, counts
    )


def reject(target: Target, given: DraftBatch, parameters: Parameters, draft_probs: Tensor | None) -> Verified:
    """Drafts that a coin accepts, and what ``reference/rejection`` draws instead of the first that it does not."""
    if target.tp is not None:
        return _reject_over_ranks(target.tp, target, given, parameters, draft_probs)
    backend = _recording(target, given, parameters)
    if backend is not None:
        return _reject_by_kernels(backend, target, given, parameters, draft_probs)
    drafts = given.drafts()

    def step_at(nodes: Nodes, stream: Stream) -> SampleInputs:
        rows, params = parameters.at(nodes, drafts, target.vocab_size)
        return target.step(target.states.index_select(0, nodes.row), rows, params._replace(stream=stream))

    ids = torch.nn.functional.pad(drafts.token_ids, (0, 1), value=-1)
    places = torch.nn.functional.pad(drafts.places(), (0, 1))
    before, there = drafts.predecessors(), drafts.token_ids >= 0
    held = ids.flatten()[before.request * ids.shape[1] + before.node]
    step = step_at(before, Stream.ACCEPTANCE_COIN)
    accepted = drafts.up_to(there & ops.accept(step, held, draft_probs)[places[:, :-1]] if held.shape[0] else there)
    last = accepted.num_accepted[:, None]
    nodes = drafts.ends(last[:, 0])
    refused, place = ids.gather(1, last)[:, 0], places.gather(1, last)[:, 0]
    step = step_at(nodes, Stream.RECOVERY)
    rows = {"temperature": step.temperature, "seed": step.seed, "offset": step.offset}
    bonus = target.draw(step.hidden_states, **rows, **_request(step.params._replace(stream=Stream.TOKEN))).token_ids
    is_draft = (refused >= 0) & (refused < target.vocab_size)
    tokens = torch.where(is_draft, ops.recover(step, refused, draft_probs, place), bonus) if held.shape[0] else bonus
    return _output(drafts, accepted, ids.masked_fill(accepted.nodes < 0, -1).scatter(1, last, tokens[:, None]))


def _reject_over_ranks(
    tp: "TensorParallel", target: Target, given: DraftBatch, parameters: Parameters, draft_probs: Tensor | None
) -> Verified:
    """See ``tensor_parallel/rejection``."""
    drafts = given.drafts()
    rows, params = parameters.at(drafts.nodes(), drafts, target.vocab_size)
    drafted = DraftChains(
        drafts.token_ids, drafts.rows, drafts.places(), draft_probs if given.token_ids.numel() else None
    )
    last, num_accepted = _drawn_over_ranks(tp, target, rows, params, drafted=drafted).view(2, given.batch)
    ids = torch.nn.functional.pad(drafts.token_ids, (0, 1), value=-1)
    accepted = drafts.first(num_accepted)
    return _output(
        drafts, accepted, ids.masked_fill(accepted.nodes < 0, -1).scatter(1, num_accepted[:, None], last[:, None])
    )


def _recording(target: Target, given: DraftBatch, parameters: Parameters) -> Backend | None:
    """Who draws, if it leaves what kernels reject by, and they can; None: torch rejects."""
    if not _by_kernels(target.states, given):
        return None
    masks, params = parameters.masks, parameters.params
    rows = {"temperature": parameters.temperature, "seed": parameters.seed, "offset": parameters.offset}
    # of requests where it will be of positions, which is all the same to the choice; masses as log-probabilities need them
    params = params._replace(logprobs=True, token_mask=params.token_mask if masks is None else masks)
    step = target.step(target.states, rows, params)
    backend = ops.choose(step, target.impl or "")
    return backend if backend.records else None


def _reject_by_kernels(
    backend: Backend, target: Target, given: DraftBatch, parameters: Parameters, draft_probs: Tensor | None
) -> Verified:
    from ..kernels.triton.speculative import rejection

    with torch.cuda.device_of(target.states):
        step = target.step(target.states, *_expand(target, given, parameters))
        return Verified(*rejection.run(step, backend.recorded(step), given.token_ids, *given[2:], draft_probs), None)


def _output(drafts: Drafts, accepted: Accepted, token_ids: Tensor) -> Verified:
    """``token_ids``: accepted drafts and what comes next."""
    count, nodes = accepted
    there = token_ids.gather(1, count[:, None])[:, 0] >= 0
    path = None if drafts.tree is None else (nodes[:, 1:] - 1).clamp(min=-1)
    return Verified(token_ids, count, count + there, path)


# -- arguments


def check_draft_probs(draft_probs: Any, method: str, target: Target, given: DraftBatch) -> Tensor | None:
    """(N, V or more)."""
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
    nobody_s = given.batch == 0 and draft_probs.ndim == 2  # of drafts one request after the other, (N,)
    if (draft_probs.shape[:-1] != shape and not nobody_s) or draft_probs.shape[-1] < target.vocab_size:
        wanted = f"({', '.join(map(str, shape))}, {target.vocab_size})"
        raise ValueError(f"draft_probs must have shape {wanted}, got shape {tuple(draft_probs.shape)}")
    return draft_probs.flatten(0, -2)


def asked_at(
    request: Request, target: Target, given: DraftBatch, function: Callable[..., Any]
) -> tuple[SamplingParams, Tensor | None]:
    """What is asked for, a row per request, and masks of every position if there are such. ``function``: whose arguments these
    are."""
    positions, batch, device = target.states.shape[0], given.batch, target.states.device
    request, masks = request.copy(), None
    mask = request.get("token_mask")
    if batch == 0 and is_plain(mask) and mask.ndim == 2:  # nobody's, as drafts are
        request["token_mask"] = mask = mask[:0]
    if is_plain(mask) and (mask.ndim == 3 or (mask.ndim == 2 and mask.shape[0] == positions != batch)):
        if mask.shape[:-1] not in ((batch, given.n + 1), (positions,)) or (given.bounds is not None) != (
            mask.ndim == 2
        ):
            raise ValueError(f"token_mask must have a row per request or per position, got shape {tuple(mask.shape)}")
        every = BatchShape(positions, target.vocab, target.vocab_size, device, 1)
        masks = parse_sampling_params({"token_mask": mask.flatten(0, -2)}, every).token_mask
        del request["token_mask"]
    params = parse_sampling_params(
        request, BatchShape(batch, target.vocab, target.vocab_size, device, 1, target.head), function
    )
    beside = [name for name in params.names() if name in ("logprobs", "top_logprobs", "logprob_ids", "logsumexp")]
    if beside:
        raise ValueError(f"{arguments(beside)} must be left out: verify returns token ids alone")
    return params, masks


def _request(params: SamplingParams) -> dict[str, Any]:
    """As ``sample`` takes it."""
    request = {ARGUMENTS.get(name, name): getattr(params, name) for name in params.names()}
    if params.bias_ids is not None:
        request["logit_bias"] = (params.bias_ids, params.bias_values)
    if isinstance(request.get("joint_top_p"), int):  # not 0, or it were not asked for
        request["joint_top_p"] = True
    return request
