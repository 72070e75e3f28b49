"""``verify``: accepts drafts of several tokens per request by what the target draws."""

from typing import TYPE_CHECKING, SupportsIndex

from torch import Tensor

from ..ops import count_skipped_call
from ..param_parsers import BatchShape, batch_shape
from ..row_params import Integers, Reals
from ..sampling import (
    check_impl,
    check_kind,
    check_logits,
    check_matrices,
    check_tensor_parallel,
    check_vocab_size,
    parse_rows,
)
from ..sampling_params import SamplingOptions, with_sampling_options
from ..token_counts import TokenCounts
from .acceptance import (
    METHODS,
    RequestParams,
    Target,
    VerifyOutput,
    check_draft_probs,
    match,
    parse_request_params,
    reject,
)
from .drafts import DraftBatch, layout

if TYPE_CHECKING:
    from typing_extensions import Unpack  # typing's from Python 3.11 on; torch installs this package

    from ..tensor_parallel import TensorParallel

__all__ = ["VerifyOutput", "verify", "verify_from_logits"]


@with_sampling_options
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
    **params: "Unpack[SamplingOptions]",
) -> VerifyOutput:
    """Verifies every request's drafts with the target and draws the token after the accepted ones, in one step over all
    positions: the target's half of speculative decoding. Matching stores no logits.

    ``method="match"`` draws every position's token as ``sample`` does, with the request's own noise at ``offset`` +
    position, and accepts drafts while they are equal. The output is bit for bit what the request gets without drafts,
    for any drafts, and needs no draft probabilities. A drafter that samples with the same seeds and offsets is coupled
    to the target: they agree with probability (1 - TV) / (1 + TV) at least, where TV is their distance in total
        variation.

    ``method="rejection"`` accepts a draft x with probability min(1, p(x) / q(x)), else draws from max(p - q, 0)
    (Leviathan, Kalman and Matias, ICML 2023; Chen et al. 2023). Its tokens have the target's distribution but differ
    from those of decoding without drafts. It accepts 1 - TV of the drafts, which is more than matching drafts of
    independent noise. p is the distribution that ``sample`` draws from, after penalties and filters. It is exact only
    if drafts come from ``draft_probs``.

    A request with n drafts has n + 1 positions, each with hidden states: its last token's, then each draft's. Requests
    may have fewer drafts, or none, and any temperatures. There are two layouts:

    * Rectangle: ``draft_token_ids`` (B, n), -1 where a request has no draft; ``hidden_states`` (B, n + 1, D). Positions
      after a request's drafts are computed and ignored.
    * Ragged: ``draft_token_ids`` (N,), request b has those from ``cu_draft_lengths[b]`` up to ``cu_draft_lengths[b +
      1]``; ``hidden_states`` (N + B, D), request b has those from ``cu_draft_lengths[b] + b`` on.

    Args:
        hidden_states: the target's; dtypes as in ``sample``.
        weight: (V, D), the target's LM head, as in ``sample``.
        draft_token_ids: int32 or int64. An id below 0, or from ``vocab_size`` on, is no draft and is never accepted. A
            chain ends there: the token after the drafts before it is the one that ``sample`` draws, with rejection too.
            In a tree its siblings stay, and its descendants are not accepted.
        cu_draft_lengths: B + 1 integers from 0 on, non-decreasing, the last at most N. Drafts from the last one on are
            padding, so a CUDA graph may be captured with an N that is large enough. The host does not read a tensor on
            the device; ``max_draft_length`` must then be given.
        max_draft_length: n, the most drafts of a request that are verified. None: the most in a list of
            ``cu_draft_lengths``. Only with ``cu_draft_lengths``.
        parents: for trees (Medusa, EAGLE), shape of ``draft_token_ids``: the index of a draft's parent among the
            request's drafts, less than its own, or -1 for the root. Among equal siblings the first counts. A draft with
            another parent is not accepted, nor are its descendants. None: chains. Only with "match".
        method: "match" or "rejection".
        draft_probs: q, the distributions that drafts were drawn from, with at least ``vocab_size`` columns; float32,
            bfloat16 or float16. Values below 0 count as 0. None: drafts are certain, q is 1 at the draft. Only with
            "rejection". With ``tp`` it covers the whole vocabulary, at least ``tp.vocab_size`` columns, and ranks
            compare its bits.
        temperature, vocab_size, impl, tp: as in ``sample``; a value per row is a value per request. Every position is a
            row of ``tp.max_batch_size``. With "rejection" ``impl`` draws the token after drafts that are all accepted;
            on a GPU "cute", "triton" and None do everything. With ``tp`` the backend is ``tp.impl`` for everything.
        seed: as in ``sample``, one per request.
        offset: the request's position: the number of tokens it has drawn. Its next one is ``offset + num_emitted``.
        bias, logit_scale, ..., joint_top_p: as in ``sample``, a value per request; outputs besides tokens are refused.
            ``token_mask`` may also have a row for each row of ``hidden_states``, (B, n + 1, ceil(V / 32)) or
            (N + B, ceil(V / 32)), for grammars. Penalties at a position count the drafts before it, which takes 4 V
            bytes per position, only with a penalty. A ``TokenCounts`` counts the emitted tokens.

    "match" is one ``sample`` over all positions and, on a GPU, two small launches. For trees, without Triton and under
    ``torch.compile`` it is some thirty torch operations instead. Nothing waits for the device, and a CUDA graph can
    capture it. Trees take a few times n**2 bytes per request.

    "rejection" on a GPU writes the logits of all positions, (N + B) V float32. It is six launches on a Hopper GPU; on
    others, and with masks, biases or penalties, seven; a graph can capture them. Elsewhere, and under
    ``torch.compile``, it computes probabilities in torch in float64, a bounded number of rows at a time: memory does
    not grow with the batch, but it is slow. With ``tp`` each rank stores its shard's logits, and the ranks communicate
    logits and results (docs/tensor_parallel.md); every rank reads all of q for the comparison.

    Returns:
        VerifyOutput.

    Raises:
        TypeError: an argument has the wrong type or dtype, or there is no such parameter.
        ValueError: a shape, device or range does not fit, or two arguments do not go together.
        flashsampling.tensor_parallel.TensorParallelError: as ``sample``.

    Warns:
        UserWarning: as ``sample``.

    Example:
        >>> import torch, flashsampling
        >>> weight = torch.zeros(1000, 8)  # all of 1000 tokens are equally likely
        >>> seeds = torch.arange(3)
        >>> drafts = torch.tensor([[414, 142], [777, 5], [-1, -1]])  # what sample draws for seeds 0 and 1, and a 5
        >>> out = flashsampling.verify(torch.zeros(3, 3, 8), weight, drafts, seed=seeds)
        >>> out.token_ids
        tensor([[414, 142, 992],
                [777, 392,  -1],
                [916,  -1,  -1]])
        >>> out.num_accepted, out.num_emitted
        (tensor([2, 1, 0]), tensor([3, 2, 1]))
        >>> flat = {"cu_draft_lengths": [0, 2, 4, 4]}  # the same, ragged
        >>> flashsampling.verify(torch.zeros(7, 8), weight, drafts[:2].flatten(), **flat, seed=seeds).num_emitted
        tensor([3, 2, 1])
        >>> parents = torch.tensor([[-1, -1, 1]])  # a tree: 7 or 414 comes first, and 142 after 414
        >>> drafts = torch.tensor([[7, 414, 142]])
        >>> out = flashsampling.verify(torch.zeros(1, 4, 8), weight, drafts, parents=parents, seed=0)
        >>> out.token_ids, out.accepted_drafts
        (tensor([[414, 142, 992,  -1]]), tensor([[ 1,  2, -1]]))
    """
    try:
        check_kind("hidden_states", hidden_states)
        given, states = layout(
            "hidden_states", hidden_states, draft_token_ids, cu_draft_lengths, max_draft_length, parents
        )
        _, rows, _ = check_matrices(states, weight, 1 if tp is None else 0, "verify_from_logits")
        if tp is not None:
            if seed is None:
                raise ValueError("seed must be given with tp: all ranks need the same")
            check_tensor_parallel(tp, vocab_size, impl)
        tokens = check_vocab_size(vocab_size, rows) if tp is None else tp.vocab_size
        target = Target(states, weight, batch_shape(states.shape[0], rows, tokens, states.device, 1, tp), impl, tp)
        return _verify(target, given, method, draft_probs, temperature, seed, offset, params)
    except BaseException as error:
        count_skipped_call(tp, error)
        raise


@with_sampling_options
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
    **params: "Unpack[SamplingOptions]",
) -> VerifyOutput:
    """Verifies drafts as ``verify`` does, with target logits that are in memory. ``sample_from_logits`` is to
    ``sample`` as this is to ``verify``.

    Args:
        target_logits: float32, float16 or bfloat16, one row for each position of ``verify``. Not written to.
        vocab_size, impl, bias, logit_scale, soft_cap: as in ``sample_from_logits``.
        draft_token_ids, cu_draft_lengths, max_draft_length, parents, method, draft_probs and all others: as in
        ``verify``.

    Returns:
        VerifyOutput.

    Raises:
        TypeError: an argument has the wrong type or dtype, or there is no such parameter.
        ValueError: a shape, device or range does not fit, or two arguments do not go together.

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
    positions, vocab = check_logits(logits, "target_logits")
    tokens = check_vocab_size(vocab_size, vocab, "target_logits", "columns")
    target = Target(logits, None, BatchShape(positions, vocab, tokens, logits.device, 1), impl)
    return _verify(target, given, method, draft_probs, temperature, seed, offset, params)


def _verify(
    target: Target,
    given: DraftBatch,
    method: str,
    draft_probs: Tensor | None,
    temperature: Reals,
    seed: Integers | None,
    offset: Integers,
    options: SamplingOptions,
) -> VerifyOutput:
    if method not in METHODS:
        raise ValueError(f"method must be one of {', '.join(METHODS)}, got {method!r}")
    check_impl(target.impl)
    probs = check_draft_probs(draft_probs, method, target, given)
    rows = parse_rows(temperature, seed, offset, given.batch, target.states.device, callers=2)
    function = verify if target.weight is not None else verify_from_logits
    parameters = RequestParams(*rows, *parse_request_params(options, target, given, function))
    out = (match if method == "match" else reject)(target, given, parameters, probs)
    counts = options.get("token_counts")
    if isinstance(counts, TokenCounts):
        counts.add(out.token_ids)
    return out
