"""``score``: log-probabilities of given tokens, without logits of all rows in memory."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from . import ops
from .exchange_protocol import WHOLE
from .inputs import SampleInputs
from .outputs import layout
from .param_parsers import batch_shape
from .reference import logit_transforms
from .reference.oracle import without_autocast
from .reference.streaming import head_logits
from .row_params import Reals, reals
from .sampling import (
    check_impl,
    check_kind,
    check_matrices,
    check_tensor_parallel,
    check_vocab_size,
)
from .sampling_params import (
    DEFAULT_PARAMS,
    HEAD_NUMBERS,
    SamplingOptions,
    parse_sampling_params,
    with_sampling_options,
)
from .torch_internals import register_dataclass

if TYPE_CHECKING:
    from typing_extensions import Unpack  # typing's from Python 3.11 on; torch installs this package

    from .tensor_parallel import TensorParallel

_ROWS = 256  # whose logits are in memory at once
_TOKENS = 8192  # of the vocabulary, at once in the backward pass
_GRADIENT_ROWS = 2048  # likewise
_RETURNED = ("return_logprobs", "return_logsumexp", "return_kept", "logprob_ids")  # outputs of ``sample``


@dataclass(frozen=True)
class ScoreOutput:
    """The output of ``score``. A pytree. Releases only add fields.

    Attributes:
        logprobs: float32, shape of ``token_ids``: log softmax of the raw logits at the token; NaN for an id out of
            range. Differentiable.
        processed_logprobs: float32, likewise: log-probability in the distribution that ``sample`` draws from; -inf for
            a token that the filters or the mask exclude. A greedy row's is taken at temperature 1.
        logsumexp: (N,) float32: log-sum-exp of the raw logits. Differentiable.
        entropy: (N,) float32, with ``return_entropy``: of the raw distribution, in nats. Differentiable.
        ranks: int64, shape of ``token_ids``, with ``return_ranks``: 1 + the number of tokens with a larger raw logit;
            -1 for an id out of range.
        top_token_ids: (N, n) int64, with ``top_logprobs``: as in ``SampleOutput``.
        top_logprobs: (N, n) float32.

    Example:
        >>> import torch, flashsampling
        >>> flashsampling.score(torch.zeros(2, 8), torch.zeros(1000, 8), torch.tensor([3, 999])).logprobs
        tensor([-6.9078, -6.9078])
    """

    logprobs: Tensor
    processed_logprobs: Tensor
    logsumexp: Tensor
    entropy: Tensor | None = None
    ranks: Tensor | None = None
    top_token_ids: Tensor | None = None
    top_logprobs: Tensor | None = None


register_dataclass(ScoreOutput, serialized_type_name="flashsampling.ScoreOutput")


@with_sampling_options
def score(
    hidden_states: Tensor,  # (N, D)
    weight: Tensor,  # (V, D)
    token_ids: Tensor,  # (N,) or (N, m)
    *,
    temperature: Reals = 1.0,  # or (N,)
    vocab_size: int | None = None,
    impl: str | None = None,
    tp: "TensorParallel | None" = None,
    return_entropy: bool = False,
    return_ranks: bool = False,
    **params: "Unpack[SamplingOptions]",
) -> ScoreOutput:
    """Scores given tokens: the numbers that ``sample`` returns for a token that it draws, bit for bit, for any token.

    It serves prompts, distillation, reward models and trainers: a rollout's log-probabilities in the engine and the
    trainer's are those of one distribution. Logits of 256 rows are in memory at a time.

    Raw log-probabilities, log-sum-exp and entropy have first derivatives for ``hidden_states``, ``weight`` and
    ``bias``; nothing else has. The backward pass, and the entropy, compute logits again, of 2048 rows and 8192 tokens
    at a time, the former for the rows with a gradient that is not zero. It accumulates in float32, with a float32 copy
    of these rows' gradients, and waits for the device to learn which rows these are.

    Args:
        hidden_states: (N, D), any N; dtypes as in ``sample``.
        weight: (V, D), as in ``sample``.
        token_ids: int32 or int64; an id below 0 or from ``vocab_size`` on has no score, as padding.
        temperature, vocab_size, impl, bias, ..., top_n_sigma: as in ``sample``: what the processed log-probabilities
            are of. The kept set of a rollout is a ``token_mask``.
        tp: as in ``sample``. The gradient of the hidden states, and the entropy, take an all-reduce of the process
            group. N, ``return_entropy`` and upstream gradients must be the same on all ranks, which nothing compares.
        return_entropy: computes the entropy, by one more matrix product.
        return_ranks: computes the ranks: reads the logits of a row again, as far as blocks have one above the token's.
        top_logprobs: as in ``sample``.

    Returns:
        ScoreOutput.

    Raises:
        TypeError: an argument has the wrong type or dtype, or there is no such parameter.
        ValueError: a shape, device or range does not fit.

    Example:
        >>> import torch, flashsampling
        >>> hidden_states, weight = torch.ones(2, 8), torch.linspace(-1, 1, 8000).view(1000, 8)
        >>> drawn = flashsampling.sample(hidden_states, weight, seed=torch.arange(2), top_k=9, return_logprobs=True)
        >>> scored = flashsampling.score(hidden_states, weight, drawn.token_ids, top_k=9)
        >>> torch.equal(scored.processed_logprobs, drawn.processed_logprobs)
        True
        >>> flashsampling.score(hidden_states, weight, torch.tensor([3, -1]), top_k=9).processed_logprobs
        tensor([-inf, nan])
    """
    try:
        for name in _RETURNED:
            if params.get(name):
                raise TypeError(f"{name} must be left out: score returns these numbers of token_ids")
        batch, rows, device = check_matrices(hidden_states, weight, 1 if tp is None else 0)
        if tp is None:
            tokens, shard = check_vocab_size(vocab_size, rows), WHOLE
            check_impl(impl)
        else:
            check_tensor_parallel(tp, vocab_size, impl)
            tokens, shard = tp.part
        shape = batch_shape(batch, rows, tokens, device, 1, tp)
        ids = _check_ids(token_ids, batch, device, shape.vocab_size)
        wanted = {**params, "return_logprobs": True, "return_logsumexp": True}
        parsed = parse_sampling_params(wanted, shape, score)._replace(scored_ids=ids, ranks=return_ranks)
        temperatures = reals("temperature", temperature, batch, device)
        inputs = SampleInputs(hidden_states.detach(), weight.detach(), temperatures, 0, 0, 1, tokens, shard, parsed)
        parts = _steps(inputs, impl or "", tp)
    except BaseException as error:
        ops.count_skipped_call(tp, error)
        raise
    logprobs, lse = parts["logprobs"], parts["logsumexp"][:, 0]
    entropy = _entropy(inputs, lse, tp) if return_entropy else None
    bias = params.get("bias") if parsed.bias is not None else None
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (hidden_states, weight, bias)):
        logprobs, lse, entropy = _Scores.apply(hidden_states, weight, bias, inputs, tp, logprobs, lse, entropy)
    return ScoreOutput(
        logprobs.view_as(token_ids), parts["processed_logprobs"].view_as(token_ids), lse, entropy,
        parts["ranks"].view_as(token_ids) if return_ranks else None, parts.get("top_token_ids"),
        parts.get("top_logprobs"),
    )  # fmt: skip


def _check_ids(token_ids: Tensor, batch: int, device: torch.device, vocab_size: int) -> Tensor:
    """Returns (N, m) int64; -1 for an id out of range."""
    check_kind("token_ids", token_ids)
    if token_ids.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"token_ids must be int32 or int64, got {token_ids.dtype}")
    if token_ids.ndim not in (1, 2) or token_ids.shape[0] != batch:
        raise ValueError(f"token_ids must have shape ({batch},) or ({batch}, m), got shape {tuple(token_ids.shape)}")
    if token_ids.device != device:
        raise ValueError(f"token_ids must be on the device of hidden_states, {device}, got {token_ids.device}")
    ids = token_ids.long().reshape(batch, token_ids.shape[1] if token_ids.ndim == 2 else 1)
    return torch.where((ids >= 0) & (ids < vocab_size), ids, -1)


@torch.no_grad()
def _steps(inputs: SampleInputs, impl: str, tp: "TensorParallel | None") -> dict[str, Tensor]:
    """Returns the outputs of all rows, some rows a step, (N, columns) each."""
    batch = inputs.hidden_states.shape[0]
    at_once = _ROWS if tp is None else min(_ROWS, tp.max_batch_size)
    steps = []
    for first in range(0, max(batch, 1), at_once):
        part = inputs.part(first, min(first + at_once, batch))
        result = ops.sample(part, impl) if tp is None else ops.sample_sharded(part, tp)
        steps.append(layout(part.hidden_states.shape[0], 1, part.params).split(result, part.hidden_states.shape[0]))
    return {name: torch.cat([step[name] for step in steps]) if len(steps) > 1 else steps[0][name] for name in steps[0]}


def _raw_logits(inputs: SampleInputs, rows: Tensor | slice, first: int, last: int) -> tuple[Tensor, Tensor]:
    """Returns the head's product and the raw logits of some rows and tokens, (n, last - first) float32; the second as a
    function of the first, for autograd."""
    params = DEFAULT_PARAMS._replace(**{name: getattr(inputs.params, name) for name in HEAD_NUMBERS})
    if inputs.params.bias is not None:
        params = params._replace(bias=inputs.params.bias[first:last].detach())
    with torch.no_grad():
        product = head_logits(inputs.hidden_states[rows], inputs.weight[first:last])
    product.requires_grad_()
    with torch.enable_grad():
        return product, logit_transforms.raw(product, params)


def _chunks(inputs: SampleInputs) -> Iterator[tuple[int, int]]:
    """Yields parts of this rank's vocabulary."""
    for first in range(0, inputs.vocab_size, _TOKENS):
        yield first, min(first + _TOKENS, inputs.vocab_size)


def _sum_over_ranks(tensor: Tensor, tp: "TensorParallel | None") -> Tensor:
    if tp is not None:
        dist.all_reduce(tensor, group=tp._group)
    return tensor


def _entropy(inputs: SampleInputs, lse: Tensor, tp: "TensorParallel | None") -> Tensor:
    """Returns (N,) float32: the entropy of the raw distributions."""
    entropy = torch.zeros(lse.shape, dtype=torch.float64, device=lse.device)
    for start in range(0, len(lse), _GRADIENT_ROWS):
        rows = slice(start, start + _GRADIENT_ROWS)
        for first, last in _chunks(inputs):
            log_p = _raw_logits(inputs, rows, first, last)[1].detach() - lse[rows, None]
            entropy[rows] -= torch.where(log_p.isneginf(), 0.0, log_p.exp() * log_p).sum(1, dtype=torch.float64)
    return _sum_over_ranks(entropy, tp).float()


class _Scores(torch.autograd.Function):
    """Gives raw log-probabilities, log-sum-exp and entropy, which are known, their gradients.

    With raw logits x, p = softmax(x) and upstream gradients g: dx = g_logprob * onehot(token) + p * (g_logsumexp -
    sum(g_logprob) - g_entropy * (log p + entropy)).
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_states: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        inputs: SampleInputs,
        tp: "TensorParallel | None",
        logprobs: Tensor,  # (N, m)
        lse: Tensor,  # (N,)
        entropy: Tensor | None,  # (N,)
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Returns the known numbers."""
        ctx.inputs, ctx.tp = inputs._replace(hidden_states=None, weight=None), tp  # type: ignore[arg-type]
        ctx.save_for_backward(hidden_states, weight, bias, lse, entropy)
        return logprobs.clone(), lse.clone(), None if entropy is None else entropy.clone()

    @staticmethod
    def backward(
        ctx: Any,
        of_logprobs: Tensor,
        of_lse: Tensor,
        of_entropy: Tensor | None,
    ) -> tuple[Tensor | None, ...]:
        """Returns the gradients of hidden states, weight and bias."""
        if torch.is_grad_enabled():
            raise RuntimeError("score has no second derivatives: create_graph must be False")
        hidden_states, weight, bias, lse, entropy = ctx.saved_tensors
        inputs = ctx.inputs._replace(hidden_states=hidden_states, weight=weight)
        ids = inputs.params.scored_ids
        of_logprobs = torch.where(ids < 0, 0.0, of_logprobs)  # of a constant NaN
        active = (of_logprobs != 0).any(1) | (of_lse != 0)
        if of_entropy is not None:
            active |= of_entropy != 0
        rows = active.nonzero()[:, 0]
        own_ids = ids[rows] - inputs.shard.first_token
        of_logprobs, of_lse, lse = of_logprobs[rows], of_lse[rows, None], lse[rows, None]
        of_states, of_head, of_bias = ctx.needs_input_grad[:3]
        float32 = {"dtype": torch.float32, "device": lse.device}
        states_grad = torch.zeros((len(rows), hidden_states.shape[1]), **float32) if of_states else None
        weight_grad = torch.zeros_like(weight) if of_head else None
        bias_grad = torch.zeros(len(weight), **float32) if of_bias else None
        for first, last in _chunks(inputs):
            of_tokens = torch.zeros((last - first, weight.shape[1]), **float32) if of_head else None
            for start in range(0, len(rows), _GRADIENT_ROWS):
                some = slice(start, start + _GRADIENT_ROWS)
                product, raw = _raw_logits(inputs, rows[some], first, last)
                log_p = raw.detach() - lse[some]
                factor = of_lse[some] - of_logprobs[some].sum(1, keepdim=True)
                if of_entropy is not None and entropy is not None:
                    finite = torch.where(log_p.isneginf(), 0.0, log_p)
                    here = rows[some, None]
                    factor = factor - of_entropy[here] * (finite + entropy[here])
                grad = log_p.exp() * factor
                inside = (own_ids[some] >= first) & (own_ids[some] < last)
                at = torch.where(inside, own_ids[some] - first, 0)
                grad.scatter_add_(1, at, torch.where(inside, of_logprobs[some], 0.0))
                if raw is not product:
                    (grad,) = torch.autograd.grad(raw, product, grad)
                if states_grad is not None:
                    states_grad[some] += _product(grad, weight[first:last])
                if of_tokens is not None:
                    of_tokens += _product(grad.T, hidden_states[rows[some]])
                if bias_grad is not None:
                    bias_grad[first:last] += grad.sum(0)
            if weight_grad is not None and of_tokens is not None:
                weight_grad[first:last] = of_tokens.to(weight.dtype)
        if states_grad is not None:
            some_rows = _sum_over_ranks(states_grad, ctx.tp).to(hidden_states.dtype)
            states_grad = torch.zeros_like(hidden_states).index_copy_(0, rows, some_rows)
        if bias_grad is not None:
            bias_grad = bias_grad.to(bias.dtype)
        return states_grad, weight_grad, bias_grad, *[None] * 5


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Returns a @ b in float32, of a float32 and of any dtype. On a GPU a is rounded to a 16-bit dtype of b, and scaled
    to the middle of float16's range."""
    with without_autocast(a.device):
        if not b.is_cuda or b.dtype == torch.float32:
            return a @ b.float()
        if b.dtype != torch.float16:
            return torch.mm(a.to(b.dtype), b, out_dtype=torch.float32)
        exponent = torch.frexp(a.abs().amax().clamp(min=1e-38)).exponent
        scaled = torch.ldexp(a, 15 - exponent).to(torch.float16)
        return torch.ldexp(torch.mm(scaled, b, out_dtype=torch.float32), exponent - 15)
