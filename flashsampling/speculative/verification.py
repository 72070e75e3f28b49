"""``verify``: drafts of several tokens per request, held against what the target draws."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, SupportsIndex

import torch
from torch import Tensor

from ..reference.logit_transforms import GREEDY_BELOW
from ..row_params import Integers, Reals, integers, reals
from ..sampling import (
    SampleOutput,
    check_impl,
    check_kind,
    check_matrices,
    check_tensor_parallel,
    check_vocab_size,
    count_skipped_call,
    sample,
    say_that_noise_is_shared,
)
from ..sampling_from_logits import check_logits, sample_from_logits
from ..sampling_params import Request
from ..token_counts import TokenCounts
from ..torch_internals import register_dataclass
from .acceptance import METHODS, Parameters, Target, asked_at, check_draft_probs, match, reject
from .drafts import DraftBatch, layout

if TYPE_CHECKING:
    from typing_extensions import Unpack  # typing's from Python 3.11 on; torch brings this one

    from ..tensor_parallel import TensorParallel


@dataclass(frozen=True)
class VerifyOutput:
    """What ``verify`` returns. Fields are only ever added. A pytree, so exported and compiled modules may return it.

    Attributes:
        token_ids: int64, (B, n + 1): the request's next tokens, then -1: the drafts that are accepted, and one that the target
            drew behind them, in place of the first draft that is not.
        num_accepted: int64, (B,): how many of them are drafts.
        num_emitted: int64, (B,): how many there are: ``num_accepted + 1``; without the 1 where the target has no token, its
            scores being NaN or none of them finite.
        accepted_drafts: int64, (B, n): which of the request's drafts are accepted, in order, then -1: of trees, whose rows of
            the target's key and value cache are to stay. None of chains: they are the first ones.

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


def verify(
    hidden_states: Tensor,  # (B, n + 1, D), or (N + B, D)
    weight: Tensor,  # (V, D)
    draft_token_ids: Tensor,  # (B, n), or (N,)
    *,
    cu_draft_lengths: Integers | None = None,  # (B + 1,)
    max_draft_length: SupportsIndex | None = None,
    parents: Tensor | None = None,  # (B, n), or (N,)
    method: str = "match",
    draft_probs: Tensor | None = None,  # (B, n, V), or (N, V)
    temperature: Reals = 1.0,  # or (B,)
    seed: Integers | None = None,  # or (B,)
    offset: Integers = 0,  # or (B,)
    vocab_size: int | None = None,
    impl: str | None = None,
    tp: "TensorParallel | None" = None,
    **request: "Unpack[Request]",
) -> VerifyOutput:
    """Accepts of every request's drafts those that its target would have drawn, and draws the token behind them: speculative
    decoding's other half, in one step over all positions; matching stores no logits.

    ``method="match"`` draws every position's token as ``sample`` does, with the request's own noise at ``offset`` + position,
    and accepts drafts while they are equal. What comes out is bit for bit what the request gets without drafts, for whatever
    drafts, and no probabilities of theirs are needed. A drafter that samples with the same seeds and offsets is coupled to the
    target: they agree with probability (1 - TV) / (1 + TV) at least, TV being their distance in total variation.

    ``method="rejection"`` accepts a draft x with probability min(1, p(x) / q(x)) and else draws from max(p - q, 0) (Leviathan,
    Kalman and Matias, ICML 2023; Chen et al. 2023). Its tokens have the target's distribution, and more drafts are accepted
    than by matching drafts of independent noise: 1 - TV of them; but they are not those of decoding without drafts. p is what
    ``sample`` would draw from, after penalties and filters. Neither method knows what was not drafted from ``draft_probs``.

    Positions: of a request with n drafts the hidden states are those of n + 1 positions, of its last token and then of each
    draft. Requests may have fewer drafts, or none, and any temperatures.

    * As a rectangle: ``draft_token_ids`` (B, n), -1 where a request has none; ``hidden_states`` (B, n + 1, D).
      Positions behind a request's drafts are computed in vain, whatever they hold.
    * One request after the other: ``draft_token_ids`` (N,), of request b those from ``cu_draft_lengths[b]`` up to
      ``cu_draft_lengths[b + 1]``; ``hidden_states`` (N + B, D), of request b those from ``cu_draft_lengths[b] + b`` on.

    Args:
        hidden_states: the target's; dtypes as in ``sample``.
        weight: (V, D), the target's LM head, as in ``sample``.
        draft_token_ids: int32 or int64. An id that is no token (below 0, or ``vocab_size`` or more) is no draft, wherever
            it stands, and is never accepted. A chain has no draft from there on: the token behind the drafts before it is
            the one that ``sample`` draws, by rejection too. In a tree its siblings stand, and what follows it is not
            accepted.
        cu_draft_lengths: B + 1 integers from 0 on, none below the one before it, the last at most N. Drafts from the last one
            on belong to nobody, so a CUDA graph may be captured with an N that is large enough. A tensor on the device is not
            read by the host; then ``max_draft_length`` must be given.
        max_draft_length: n, the most drafts of a request that are looked at. None: the most there are in a list of
            ``cu_draft_lengths``. Only with it.
        parents: of trees (Medusa, EAGLE), as ``draft_token_ids``: the number of the draft before this one among the request's,
            less than its own, or -1: it comes first. Of drafts that follow the same one and are the same token the first
            counts. A draft with another parent is not accepted, nor what follows it. None: chains. Only with "match".
        method: "match" or "rejection".
        draft_probs: q, what each draft was drawn from, of at least ``vocab_size`` columns; float32, bfloat16 or float16. Below
            0 is as 0. None: drafts are certain, q is 1 at the draft. Only with "rejection". With ``tp`` the whole vocabulary's,
            of ``tp.vocab_size`` columns at least, and the same bits on every rank, which are compared.
        temperature, vocab_size, impl, tp: as in ``sample``; values per row are per request. Of ``tp.max_batch_size`` every
            position is a row. With "rejection" ``impl`` is who draws the token behind drafts that are all accepted; on a GPU
            "cute", "triton", or None, does all. With ``tp`` it is ``tp.impl``, whatever is drawn.
        seed: as in ``sample``, one per request.
        offset: the request's position: how many tokens it has drawn. Its next one is this and ``num_emitted``.
        request: as in ``sample``, a value per request, but for what comes back beside tokens. ``token_mask`` may also have a
            row for each row of ``hidden_states``, (B, n + 1, ceil(V / 32)) or (N + B, ceil(V / 32)), as grammars need it. At a
            position the penalties count the drafts before it; that takes 4 V bytes for every position, only where a penalty is
            asked for. A ``TokenCounts`` counts what is emitted.

    "match" is one ``sample`` over all positions and two small launches on a GPU, or some thirty torch operations: of trees,
    where there is no Triton, and where a compiler looks. Nothing waits for the device, and a CUDA graph can hold it. Trees take
    n**2 bytes and a few times that per request. "rejection" on a GPU writes the logits of all positions, (N + B) V float32,
    and is six launches on a Hopper GPU, else or with masks, biases or penalties seven, which a graph can hold too.
    Elsewhere, and where a compiler looks, it makes probabilities in torch, in float64, a bounded number of rows at a time:
    memory does not grow with the batch, but it is not fast. With ``tp`` each rank stores its shard's logits, and the ranks meet
    in three rounds or more (docs/tensor_parallel.md), written in torch; q is read whole on every rank, for the comparison.

    Returns:
        VerifyOutput.

    Raises:
        TypeError: an argument is of the wrong type or dtype.
        ValueError: a shape, device or range does not fit, or one argument does not go with another.
        flashsampling.tensor_parallel.TensorParallelError: as ``sample``.

    Warns:
        UserWarning: as ``sample``.

    Example:
        >>> import torch, flashsampling
        >>> weight = torch.zeros(1000, 8)  # all of 1000 tokens are as likely
        >>> seeds = torch.arange(3)
        >>> drafts = torch.tensor([[414, 142], [777, 5], [-1, -1]])  # what sample draws for seeds 0 and 1, and a 5
        >>> out = flashsampling.verify(torch.zeros(3, 3, 8), weight, drafts, seed=seeds)
        >>> out.token_ids
        tensor([[414, 142, 992],
                [777, 392,  -1],
                [916,  -1,  -1]])
        >>> out.num_accepted, out.num_emitted
        (tensor([2, 1, 0]), tensor([3, 2, 1]))
        >>> flat = {"cu_draft_lengths": [0, 2, 4, 4]}  # the same, one request after the other
        >>> flashsampling.verify(torch.zeros(7, 8), weight, drafts[:2].flatten(), **flat, seed=seeds).num_emitted
        tensor([3, 2, 1])
        >>> parents = torch.tensor([[-1, -1, 1]])  # a tree: 7 or 414 comes first, and 142 after 414
        >>> out = flashsampling.verify(torch.zeros(1, 4, 8), weight, torch.tensor([[7, 414, 142]]), parents=parents, seed=0)
        >>> out.token_ids, out.accepted_drafts
        (tensor([[414, 142, 992,  -1]]), tensor([[ 1,  2, -1]]))
    """
    try:
        check_kind("hidden_states", hidden_states)
        given, states = layout(
            "hidden_states", hidden_states, draft_token_ids, cu_draft_lengths, max_draft_length, parents
        )
        _, vocab, _ = check_matrices(states, weight, 1 if tp is None else 0, "verify_from_logits")
        if tp is not None:
            if seed is None:
                raise ValueError("seed must be given with tp: all ranks need the same")
            check_tensor_parallel(tp, vocab_size, impl)
            vocab, tokens, head = tp.num_rows, tp.vocab_size, vocab
        else:
            tokens, head = check_vocab_size(vocab_size, vocab), None

        def draw(rows: Tensor, **parameters: Any) -> SampleOutput:
            return sample(rows, weight, vocab_size=vocab_size, impl=impl, tp=tp, **parameters)

        target = Target(states, weight, vocab, tokens, draw, impl, head, tp)
        return _verify(target, given, method, draft_probs, temperature, seed, offset, impl, request)
    except BaseException as error:
        count_skipped_call(tp, error)
        raise


def verify_from_logits(
    target_logits: Tensor,  # (B, n + 1, V), or (N + B, V)
    draft_token_ids: Tensor,  # (B, n), or (N,)
    *,
    cu_draft_lengths: Integers | None = None,  # (B + 1,)
    max_draft_length: SupportsIndex | None = None,
    parents: Tensor | None = None,  # (B, n), or (N,)
    method: str = "match",
    draft_probs: Tensor | None = None,  # (B, n, V), or (N, V)
    temperature: Reals = 1.0,  # or (B,)
    seed: Integers | None = None,  # or (B,)
    offset: Integers = 0,  # or (B,)
    vocab_size: int | None = None,
    impl: str | None = None,
    **request: "Unpack[Request]",
) -> VerifyOutput:
    """``verify`` where the target's logits are in memory already: what ``sample_from_logits`` is to ``sample``.

    Args:
        target_logits: float32, float16 or bfloat16; of the positions of which ``verify`` has the hidden states. Not written to.
        vocab_size, impl, bias, logit_scale, soft_cap: as in ``sample_from_logits``.
        draft_token_ids, cu_draft_lengths, max_draft_length, parents, method, draft_probs, and all others: as in ``verify``.

    Returns:
        VerifyOutput.

    Raises:
        TypeError: an argument is of the wrong type or dtype.
        ValueError: a shape, device or range does not fit, or one argument does not go with another.

    Warns:
        UserWarning: as ``sample``.

    Example:
        >>> import torch, flashsampling
        >>> p, q = torch.tensor([0.5, 0.5, 0.0]), torch.tensor([0.0, 0.5, 0.5])
        >>> drafts, logits = torch.tensor([[1], [2]]), p.log().expand(2, 2, 3)
        >>> out = flashsampling.verify_from_logits(
        ...     logits, drafts, method="rejection", draft_probs=q.expand(2, 1, 3), seed=torch.arange(2)
        ... )
        >>> out.num_accepted  # the target never draws 2
        tensor([1, 0])
        >>> out.token_ids[1]  # where 2 is not accepted, p - q leaves 0 alone
        tensor([ 0, -1])
    """
    check_kind("target_logits", target_logits)
    given, logits = layout("target_logits", target_logits, draft_token_ids, cu_draft_lengths, max_draft_length, parents)
    _, vocab = check_logits(logits, "target_logits")
    tokens = check_vocab_size(vocab_size, vocab, "target_logits", "columns")

    def draw(rows: Tensor, **parameters: Any) -> SampleOutput:
        return sample_from_logits(rows, vocab_size=vocab_size, impl=impl, **parameters)

    target = Target(logits, None, vocab, tokens, draw, impl)
    return _verify(target, given, method, draft_probs, temperature, seed, offset, impl, request)


def _verify(
    target: Target,
    given: DraftBatch,
    method: str,
    draft_probs: Tensor | None,
    temperature: Reals,
    seed: Integers | None,
    offset: Integers,
    impl: str | None,
    request: Request,
) -> VerifyOutput:
    batch, device = given.batch, target.states.device
    if method not in METHODS:
        raise ValueError(f"method must be one of {', '.join(METHODS)}, got {method!r}")
    check_impl(impl)
    probs = check_draft_probs(draft_probs, method, target, given)
    if seed is None:
        seed = torch.randint(-(2**63), 2**63 - 1, (batch,), dtype=torch.int64, device=device)
    temperatures = reals("temperature", temperature, batch, device)
    seeds = integers("seed", seed, batch, device)
    offsets = integers("offset", offset, batch, device)
    if batch > 1 and not (isinstance(seeds, Tensor) or isinstance(offsets, Tensor) or torch.compiler.is_compiling()):
        greedy = not isinstance(temperatures, Tensor) and temperatures < GREEDY_BELOW
        say_that_noise_is_shared(batch, greedy, callers=2)
    params, masks = asked_at(request, target, given, verify if target.weight is not None else verify_from_logits)
    parameters = Parameters(temperatures, seeds, offsets, params, masks)
    out = VerifyOutput(*(match if method == "match" else reject)(target, given, parameters, probs))
    counts = request.get("token_counts")
    if isinstance(counts, TokenCounts):
        counts.add(out.token_ids)
    return out
