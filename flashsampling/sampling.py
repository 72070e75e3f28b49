"""The public function: validate, choose, call, return."""

import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Parameter

from . import noise, ops
from .backends import BACKENDS, named
from .exchange_protocol import NO_TOKEN, WHOLE
from .inputs import DEFAULT_PARAMS, SampleInputs, SampleResult, SamplingParams, layout
from .reference.logit_transforms import GREEDY_BELOW
from .row_params import Integers, Reals, integer, integers, is_dense, kind_of, reals
from .sampling_params import Request, batch_shape, parse_sampling_params
from .token_counts import TokenCounts
from .torch_internals import is_traceable_wrapper_subclass, register_dataclass

if TYPE_CHECKING:
    from typing_extensions import Unpack  # typing's from Python 3.11 on; torch brings this one

    from .tensor_parallel import TensorParallel

DTYPES = (torch.bfloat16, torch.float16, torch.float32)

_said_that_noise_is_shared = False


@dataclass(frozen=True, init=False)
class SampleOutput:
    """What a sampling step returns. Fields are only ever added. A pytree, so exported and compiled modules may return it.

    Attributes:
        token_ids: int64, (B,), or (B, num_samples) when ``num_samples > 1``. -1 in a row whose scores hold a NaN or no
            finite value; such a row leaves the others untouched.
        logprobs: float32, of ``token_ids``' shape: log softmax of the head's logits, the raw ones, at the token. NaN of a -1.
        processed_logprobs: float32, likewise: of the distribution that was drawn from. A greedy row's is that at temperature 1.
        ranks: int64, likewise: 1 + how many tokens have a larger raw logit; -1 of a -1.
        top_token_ids: int64, (B, n): the tokens with the highest raw logits, the lowest ids of equal ones; -1 in a row of NaN.
        top_logprobs: float32, (B, n): theirs, raw; NaN in a row of NaN.
        given_logprobs: float32, (B, m): raw log-probabilities of ``logprob_ids``; NaN of an id out of range.
        logsumexp: float32, (B,): of the raw logits.

        All but ``token_ids`` are None unless they are asked for. Logarithms are natural.

    Example:
        >>> import torch, flashsampling
        >>> hidden_states, weight = torch.zeros(2, 8), torch.zeros(1000, 8)
        >>> flashsampling.sample(hidden_states, weight, seed=torch.arange(2), num_samples=3).token_ids.shape
        torch.Size([2, 3])
    """

    token_ids: Tensor
    logprobs: Tensor | None = None
    processed_logprobs: Tensor | None = None
    ranks: Tensor | None = None
    top_token_ids: Tensor | None = None
    top_logprobs: Tensor | None = None
    given_logprobs: Tensor | None = None
    logsumexp: Tensor | None = None

    def __init__(
        self,
        token_ids: Tensor,
        logprobs: Tensor | None = None,
        processed_logprobs: Tensor | None = None,
        ranks: Tensor | None = None,
        top_token_ids: Tensor | None = None,
        top_logprobs: Tensor | None = None,
        given_logprobs: Tensor | None = None,
        logsumexp: Tensor | None = None,
    ) -> None:
        object.__setattr__(self, "token_ids", token_ids)
        # what a dataclass would write costs a call of the host a microsecond; a field that is not written is the class's None
        if logprobs is not None:
            object.__setattr__(self, "logprobs", logprobs)
        if processed_logprobs is not None:
            object.__setattr__(self, "processed_logprobs", processed_logprobs)
        if ranks is not None:
            object.__setattr__(self, "ranks", ranks)
        if top_token_ids is not None:
            object.__setattr__(self, "top_token_ids", top_token_ids)
        if top_logprobs is not None:
            object.__setattr__(self, "top_logprobs", top_logprobs)
        if given_logprobs is not None:
            object.__setattr__(self, "given_logprobs", given_logprobs)
        if logsumexp is not None:
            object.__setattr__(self, "logsumexp", logsumexp)


register_dataclass(SampleOutput, serialized_type_name="flashsampling.SampleOutput")


def sample(
    hidden_states: Tensor,  # (B, D)
    weight: Tensor,  # (V, D)
    *,
    temperature: Reals = 1.0,  # or (B,)
    seed: Integers | None = None,  # or (B,)
    offset: Integers = 0,  # or (B,)
    num_samples: int = 1,
    vocab_size: int | None = None,
    impl: str | None = None,
    tp: "TensorParallel | None" = None,
    **request: "Unpack[Request]",
) -> SampleOutput:
    """Draws token ids from ``softmax(hidden_states @ weight.T / temperature)``, exactly, without storing the logits.

    The draw is ``argmax(logits / temperature + Gumbel noise)`` (the Gumbel-max trick; FlashSampling, arXiv 2603.15854), with
    logits accumulated in fp32 and noise that is a pure function of (seed, offset, draw, token id): row b's token depends on
    row b alone, not on the batch, the implementation's tiling or whether a CUDA graph replays.

    Args:
        hidden_states: (B, D), bfloat16, float16 or float32; B may be 0.
        weight: (V, D), the LM head, same dtype and device; any row stride. A plain tensor: neither quantised nor a DTensor.
            What a model does to its logits beside it is not seen: say so by ``bias``, ``logit_scale`` and ``soft_cap``.
        temperature: at least 0; one number, or one per row. Below 1e-6 a row is greedy.
        seed: 64 bits, negative values count as their two's complement; one integer, or one per row. None draws one per row
            from torch's default generator of the device. One integer is every row's seed, and rows that share (seed, offset)
            share their noise: those with equal hidden states draw equal tokens, at every call with that offset. Independent
            rows need seeds of their own, and a row's next token the next offset::

                seeds = torch.arange(batch, device=device)  # one per request, for all its tokens
                for position in range(max_new_tokens):
                    token_ids = sample(hidden_states, weight, seed=seeds, offset=position).token_ids

            ``LMHeadSampler`` does both by itself.
        offset: 64 bits; one integer, or one per row: the row's position, by convention how many tokens it has drawn.
        num_samples: draws per row, 1 to 2**24; each has noise of its own.
        vocab_size: real size where ``weight`` is padded; rows from it on are never sampled. At most 2**31 - 1.
        impl: "reference", "streaming", "triton" or "cute". None chooses by device and problem; a name never falls back.
        tp: a ``flashsampling.tensor_parallel.TensorParallel``: ``weight`` is then this rank's shard, the one that
        ``tp`` was made
            with, and every rank of the group makes this call with the same hidden states and parameters, and gets the same
            token ids. ``seed`` must be given; ``impl`` and ``vocab_size`` belong to ``tp``. ``torch.compile`` keeps the call
            where its tokens are unused, and keeps the order of such calls; ``tp`` must be open whenever they run.

    What a request asks for; None and False: nothing. It happens in this order: the head's ``bias``, ``logit_scale`` and
    ``soft_cap`` make the raw logits, ``logit_bias``, the penalties and ``token_mask`` the processed ones; those over the
    temperature, top-k, top-p of what top-k kept (but see ``joint_top_p``), min-p; the draw. A kept token's score is the one
    that it has without filters, so a filter that keeps the winner does not change it. Equal logits are ordered by id, the
    lowest first.

    Args:
        bias: (V,), the head's own, of float32, bfloat16 or float16, added in fp32.
        logit_scale: times every logit (Cohere; Granite divides: give 1 / x).
        soft_cap: c makes ``c * tanh(logit / c)`` of a logit (Gemma), from 1.2e-38 on; 0 is none.
        logit_bias: (V,) of the same dtypes, added in all rows; or a pair of token ids (int32 or int64) and values, (B, n) each,
            or (n,) for all rows, n up to 1024. An id out of range, as -1, adds nothing; of one that is named twice both count.
        token_counts: what the penalties read: a ``TokenCounts``, of which rows 0 to B - 1 are used and count the drawn token
            (``num_samples`` is then 1); or int32 (B, V), not written to, whose low 31 bits say how often a token is in the
            output, and bit 31 that it is in the prompt.
        repetition_penalty: r > 0: positive logits of the prompt's and the output's tokens are divided by r, others multiplied
            (Keskar et al. 2019). 1 is off.
        frequency_penalty: taken off a logit for every time that its token is in the output (OpenAI's definition). 0 is off.
        presence_penalty: taken off once if its token is in the output (OpenAI's). 0 is off.
        token_mask: int32 (B, ceil(V / 32)), or one row of that for all: token t may be drawn if bit t & 31 of word t >> 5 is
            set (as in xgrammar, llguidance and vLLM). The others are not there at all. A row with no token left gives -1.
        top_k: so many tokens, those with the highest logits (Fan et al. 2018). Below 1, or V and more: off.
        top_p: from 0 to 1: the fewest most probable tokens whose share of what top-k kept reaches it, and at least one
            (nucleus sampling, Holtzman et al. 2020). 1 is off.
        joint_top_p: whether the share of top_p is of all tokens, whatever top-k kept: both filters then keep what each would
            alone, the fewer of the two (FlashInfer's ``filter_apply_order="joint"``, and SGLang's order). A bool; or per row
            bools, in a list or a tensor, or in a tensor int32, 0 for False.
        min_p: from 0 to 1: tokens at least that many times as probable as the most probable one (Nguyen et al. 2024). 0 is off.
        return_logprobs: ``logprobs``, ``processed_logprobs`` and ``ranks`` of what is drawn.
        top_logprobs: n up to 20: ``top_token_ids`` and ``top_logprobs``.
        logprob_ids: token ids (B, m), int32 or int64, or (m,) for all rows: ``given_logprobs``.
        return_logsumexp: ``logsumexp``.

    With ``tp`` they are the whole vocabulary's on every rank, ids global ones, and the same on all ranks; but for ``bias``,
    which is (V_shard,), this rank's part as ``weight`` is, and ``token_counts``, of which a rank reads its shard's tokens. The
    ranks then meet several times in a step (docs/tensor_parallel.md).

    ``triton`` and ``cute`` do all of these; ``cute`` in one launch what changes logits alone, else with the logits in memory.

    ``temperature``, ``seed``, ``offset``, the penalties, ``top_k``, ``top_p`` and ``min_p`` take Python and numpy numbers,
    lists, tuples, numpy arrays and tensors. A value per row has shape (B,); shapes () and (1,) count for all rows. What a list
    or an array holds is checked, and copied to the device in every call; the host waits for that, and no CUDA graph can capture
    it. Tensors on the device are read by the kernel alone: a row whose ``top_p`` or ``min_p`` is NaN there gives -1.

    ``torch.compile`` makes at most two graphs for all values of a number, but for the integers 0 and 1, which have their own. A
    number that changes is a tensor in such a graph: a value that switches its parameter off costs what the parameter costs.

    Returns:
        SampleOutput.

    Raises:
        TypeError: an argument is of the wrong type or dtype.
        ValueError: a shape, device or range does not fit, or ``impl`` cannot do this problem.
        flashsampling.tensor_parallel.TensorParallelError: the ranks cannot go on together. TensorParallelTimeout: one
        did not take
            part in a step; TensorParallelMismatch: it was at another one, or gave other parameters. With the transport "gloo"
            of this step, else of an earlier one, whose rows are -1.

    Warns:
        UserWarning: once per process, where several rows, not greedy, share one integer for a seed and one for an offset.

    Example:
        >>> import torch, flashsampling
        >>> hidden_states, weight = torch.zeros(3, 8), torch.zeros(1000, 8)  # all of 1000 tokens are as likely
        >>> seeds = torch.arange(3)
        >>> flashsampling.sample(hidden_states, weight, temperature=0.8, seed=seeds).token_ids
        tensor([414, 777, 916])
        >>> flashsampling.sample(hidden_states[1:], weight, temperature=0.8, seed=seeds[1:]).token_ids  # in another batch
        tensor([777, 916])
        >>> flashsampling.sample(hidden_states, weight, temperature=0.8, seed=seeds, offset=1).token_ids  # their next tokens
        tensor([142, 392, 169])
        >>> weight[7] = 0.5  # a logit of 4; the others stay 0
        >>> out = flashsampling.sample(hidden_states + 1, weight, top_k=[1, 2, 0], seed=seeds, return_logprobs=True)
        >>> out.token_ids
        tensor([  7,   7, 916])
        >>> out.ranks
        tensor([1, 1, 2])
        >>> out.processed_logprobs  # 0: nothing else was left
        tensor([ 0.0000, -0.0181, -6.9600])
    """
    try:
        batch, vocab, device = check_matrices(hidden_states, weight, 1 if tp is None else 0)
        if tp is not None:
            if seed is None:
                raise ValueError("seed must be given with tp: all ranks need the same")
            check_tensor_parallel(tp, vocab_size, impl)
            tokens, shard = tp.part
        else:
            tokens, shard = vocab, WHOLE
            if vocab_size is not None or vocab > NO_TOKEN:
                tokens = check_vocab_size(vocab_size, vocab)
        if type(num_samples) is not int or not 1 <= num_samples <= noise.MAX_DRAWS:
            num_samples = check_num_samples(num_samples)
        if impl is not None and (type(impl) is not str or impl not in BACKENDS):
            check_impl(impl)
        if seed is None:
            seed = torch.randint(-(2**63), 2**63 - 1, (batch,), dtype=torch.int64, device=device)
        temperatures = reals("temperature", temperature, batch, device)
        seeds = integers("seed", seed, batch, device)
        offsets = integers("offset", offset, batch, device)
        if batch > 1 and not (
            isinstance(seeds, Tensor) or isinstance(offsets, Tensor) or torch.compiler.is_compiling()
        ):
            say_that_noise_is_shared(batch, greedy=not isinstance(temperatures, Tensor) and temperatures < GREEDY_BELOW)
        params = DEFAULT_PARAMS
        if request:
            params = parse_sampling_params(request, batch_shape(batch, vocab, tokens, device, num_samples, tp), sample)
        step = SampleInputs(hidden_states, weight, temperatures, seeds, offsets, num_samples, tokens, shard, params)
        drawn = ops.sample(step, impl or "") if tp is None else ops.sample_sharded(step, tp)
    except BaseException as error:
        count_skipped_call(tp, error)
        raise
    if request:
        return output_of(drawn, batch, num_samples, params, request.get("token_counts"))
    return SampleOutput(drawn.ids if num_samples == 1 else drawn.ids.view(batch, num_samples))


def output_of(
    drawn: SampleResult, batch: int, num_samples: int, params: SamplingParams, token_counts: object
) -> SampleOutput:
    """What was drawn, in its parts; a ``TokenCounts`` counts it."""
    if not params.needs_raw_mass():
        out = SampleOutput(drawn.ids if num_samples == 1 else drawn.ids.view(batch, num_samples))
    else:
        parts = layout(batch, num_samples, params).split(drawn, batch)
        flat = (
            ("logsumexp",) if num_samples > 1 else ("token_ids", "logprobs", "processed_logprobs", "ranks", "logsumexp")
        )
        out = SampleOutput(**{name: part[:, 0] if name in flat else part for name, part in parts.items()})
    if isinstance(token_counts, TokenCounts):
        token_counts.add(out.token_ids)
    return out


def check_matrices(
    hidden_states: Tensor, weight: Tensor, least_rows: int, of_logits: str = "sample_from_logits"
) -> tuple[int, int, torch.device]:
    """B, V and the device, or what ``sample`` documents. Every attribute is asked for once: a tenth of a microsecond each.
    ``of_logits``: the function that takes logits in place of hidden states."""
    if type(hidden_states) is not Tensor or hidden_states.layout is not torch.strided:
        check_kind("hidden_states", hidden_states)
    kind = type(weight)
    if kind is not Parameter and kind is not Tensor:
        check_kind("weight", weight)
    shape, weight_shape = hidden_states.shape, weight.shape
    if len(shape) != 2:
        hint = "select the positions to sample first, e.g. hidden_states[:, -1]"
        raise ValueError(f"hidden_states must have 2 dimensions, got shape {tuple(shape)}; {hint}")
    dtype, device = hidden_states.dtype, hidden_states.device
    if dtype not in DTYPES:
        raise TypeError(f"hidden_states must be bfloat16, float16 or float32, got {dtype}")
    if weight.dtype is not dtype:
        check_weight(weight, least_rows)
        raise TypeError(f"weight must have the dtype of hidden_states, {dtype}, got {weight.dtype}")
    if len(weight_shape) != 2 or weight.layout is not torch.strided:
        check_weight(weight, least_rows)
    if weight.device != device:
        raise ValueError(f"weight must be on the device of hidden_states, {device}, got {weight.device}")
    (batch, dim), (vocab, columns) = shape, weight_shape
    if dim != columns:
        if dim == vocab > columns:
            raise ValueError(
                f"hidden_states must have the {columns} columns of weight, got shape {tuple(shape)}, that of logits; use "
                f"{of_logits}, which takes them"
            )
        hint = "; it is (D, V): pass weight.T.contiguous()" if dim == vocab else ""
        raise ValueError(f"weight must have the {dim} columns of hidden_states, got shape {tuple(weight_shape)}{hint}")
    if vocab < least_rows or dim < 1:
        check_weight(weight, least_rows)
    return batch, vocab, device


def check_weight(weight: Tensor, least_rows: int = 1) -> None:
    """Raises what ``sample`` documents if a weight cannot serve whatever the hidden states are."""
    check_kind("weight", weight)
    dtype, shape = weight.dtype, tuple(weight.shape)
    if dtype not in DTYPES:
        hint = (
            ""
            if dtype.is_floating_point and dtype.itemsize > 1
            else "; of a quantised head pass the dequantised weight"
        )
        raise TypeError(f"weight must be bfloat16, float16 or float32, got {dtype}{hint}")
    if len(shape) != 2:
        raise ValueError(f"weight must have 2 dimensions, got shape {shape}")
    if shape[0] < least_rows or shape[1] < 1:
        raise ValueError(f"weight must have at least one row and one column, got shape {shape}")


def check_kind(name: str, tensor: object) -> None:
    """Raises TypeError for what is no tensor, or one whose memory is not its values."""
    if not isinstance(tensor, Tensor):
        hint = f"; pass its .{name}" if isinstance(getattr(tensor, name, None), Tensor) else ""
        if name == "weight" and hint and getattr(tensor, "bias", None) is not None:
            hint += ", and its .bias as bias"
        raise TypeError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}{hint}")
    if hasattr(tensor, "full_tensor"):
        what = (
            "this rank's rows, weight.to_local(), with tp=TensorParallel(...),"
            if name == "weight"
            else "the whole of it,"
        )
        raise TypeError(f"{name} must be a plain tensor, got a DTensor; pass {what} or {name}.full_tensor()")
    if name == "weight" and is_traceable_wrapper_subclass(tensor):
        hint = "of a quantised head pass the dequantised weight, e.g. weight.dequantize()"
        raise TypeError(f"weight must be a plain tensor, got {type(tensor).__name__}; {hint}")
    if not is_dense(tensor):
        hint = "" if tensor.is_nested else f"; pass {name}.to_dense()"
        raise TypeError(f"{name} must be a dense tensor, got {kind_of(tensor)}{hint}")


def check_vocab_size(vocab_size: int | None, vocab: int, whose: str = "weight", what: str = "rows") -> int:
    """How many of the weight's ``vocab`` rows may be sampled. Raises what ``sample`` documents."""
    if vocab_size is None:
        vocab_size = vocab
    else:
        vocab_size = vocab_size if isinstance(vocab_size, torch.SymInt) else integer("vocab_size", vocab_size)
        if not 1 <= vocab_size <= vocab:
            raise ValueError(f"vocab_size must be from 1 to the {vocab} {what} of {whose}, got {vocab_size}")
    if vocab_size > NO_TOKEN:  # which as an id says that there is none
        raise ValueError(
            f"{whose} must have at most 2**31 - 1 {what} that can be sampled, got {vocab_size}; vocab_size says how many can"
        )
    return vocab_size


def check_num_samples(num_samples: Any) -> int:
    """As an int. Raises what ``sample`` documents."""
    count = num_samples if isinstance(num_samples, torch.SymInt) else integer("num_samples", num_samples)
    if not 1 <= count <= noise.MAX_DRAWS:
        raise ValueError(f"num_samples must be from 1 to 2**24, got {count}")
    return count  # type: ignore[return-value] # a SymInt is one to whoever takes it


def check_impl(impl: str | None) -> None:
    """Raises what ``sample`` documents."""
    if impl is not None and not isinstance(impl, str):
        raise TypeError(f"impl must be None or a str, got {type(impl).__name__}")
    if impl is not None:
        named(impl)


def say_that_noise_is_shared(batch: int, greedy: bool, callers: int = 1) -> None:
    """Warns as ``sample`` documents, in the name of whoever called the function that calls this, or is so many calls below."""
    global _said_that_noise_is_shared
    if greedy or _said_that_noise_is_shared:
        return
    _said_that_noise_is_shared = True
    warnings.warn(
        f"one seed and one offset for {batch} rows: rows with equal hidden states draw equal tokens, and every call with this "
        "seed and offset draws with the same noise. Give every row a seed of its own (seed=torch.arange(B, device=...), or "
        "None) and every step its offset; LMHeadSampler does both. A tensor of equal seeds says that this is meant",
        UserWarning,
        stacklevel=2 + callers,
    )


def check_tensor_parallel(tp: "TensorParallel", vocab_size: int | None, impl: str | None) -> None:
    """Raises what ``sample`` documents."""
    from .tensor_parallel import TensorParallel  # whoever has one has imported it

    if not isinstance(tp, TensorParallel):
        raise TypeError(f"tp must be a flashsampling.tensor_parallel.TensorParallel, got {type(tp).__name__}")
    if vocab_size is not None:
        raise ValueError("vocab_size must be given to TensorParallel, not together with tp")
    if impl is not None and impl != tp.impl:
        raise ValueError(f"impl must be None or tp.impl = {tp.impl!r} with tp, got {impl!r}")


def count_skipped_call(tp: object, error: BaseException) -> None:
    """A call with ``tp`` that raised took part in no step: whatever it was, the ranks are out of step if others did."""
    if tp is not None:
        from .tensor_parallel import TensorParallel

        if isinstance(tp, TensorParallel):
            ops.count_skipped_call(tp, error)
