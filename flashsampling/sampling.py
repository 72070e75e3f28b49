"""The public functions: validate, choose a backend, call it, return."""

import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Parameter

from . import noise, ops
from .backends import named
from .exchange_protocol import NO_TOKEN, WHOLE
from .inputs import SampleInputs
from .outputs import SampleOutput, make_output
from .param_parsers import BatchShape, batch_shape
from .reference.logit_transforms import GREEDY_BELOW
from .row_params import Integers, Reals, describe_kind, integer, integers, is_dense, reals
from .sampling_params import DEFAULT_PARAMS, LogitBias, parse_sampling_params, unexpected_argument
from .token_counts import Counted, TokenCounts
from .torch_internals import is_traceable_wrapper_subclass

if TYPE_CHECKING:
    from typing_extensions import Never  # typing's from Python 3.11 on; torch installs this package

    from .tensor_parallel import TensorParallel

DTYPES = (torch.bfloat16, torch.float16, torch.float32)

_warned_of_shared_noise = False


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
    bias: Tensor | None = None,  # (V,)
    logit_scale: float | None = None,
    soft_cap: float | None = None,
    logit_bias: LogitBias | None = None,  # (V,), or ids (B, n) and values (B, n)
    token_counts: TokenCounts | Counted | Tensor | None = None,  # (B, V)
    repetition_penalty: Reals | None = None,  # or (B,)
    frequency_penalty: Reals | None = None,  # or (B,)
    presence_penalty: Reals | None = None,  # or (B,)
    token_mask: Tensor | None = None,  # (B, ceil(V / 32))
    top_k: Integers | None = None,  # or (B,)
    top_p: Reals | None = None,  # or (B,)
    min_p: Reals | None = None,  # or (B,)
    joint_top_p: bool | Sequence[bool] | Tensor | None = None,  # or (B,)
    epsilon_cutoff: Reals | None = None,  # or (B,)
    top_n_sigma: Reals | None = None,  # or (B,)
    return_logprobs: bool = False,
    top_logprobs: int | None = None,
    logprob_ids: Any = None,  # (B, m)
    return_logsumexp: bool = False,
    return_kept: bool = False,
    **unknown: "Never",
) -> SampleOutput:
    """Draws token ids from ``softmax(hidden_states @ weight.T / temperature)``, exactly, without storing the logits.

    The draw is ``argmax(logits / temperature + Gumbel noise)`` (the Gumbel-max trick; FlashSampling, arXiv 2603.15854).
    Logits are accumulated in fp32. The noise is a pure function of (seed, offset, draw, token id), so a row's token
    depends on that row alone: not on the batch, the backend's tiling, or the replay of a CUDA graph.

    Args:
        hidden_states: (B, D), bfloat16, float16 or float32; B may be 0.
        weight: (V, D), the LM head, same dtype and device; any row stride. A plain tensor, neither quantised nor a
            DTensor. The function does not see what a model does to its logits besides; ``bias``, ``logit_scale`` and
            ``soft_cap`` tell it.
        temperature: at least 0; one number, or one per row. A row below 1e-6 is greedy.
        seed: 64 bits, negative values as two's complement; one integer, or one per row. None draws one per row from
            torch's default generator of the device. One integer is the seed of every row. Rows with equal (seed,
            offset) have equal noise: those with equal hidden states draw equal tokens, in every call with that offset.
            Independent rows need their own seeds, and a row's next token needs the next offset::

                seeds = torch.arange(batch, device=device)  # one per request, for all its tokens
                for position in range(max_new_tokens):
                    token_ids = sample(hidden_states, weight, seed=seeds, offset=position).token_ids

            ``LMHeadSampler`` keeps both.
        offset: 64 bits; one integer, or one per row: the row's position, by convention the number of tokens it has
            drawn.
        num_samples: draws per row, 1 to 2**24, each with its own noise.
        vocab_size: number of tokens, if ``weight`` is padded; rows from it on are never sampled. At most 2**31 - 1.
        impl: "reference", "streaming", "triton" or "cute". None chooses by device and inputs. A named backend never
            falls back.
        tp: a ``flashsampling.tensor_parallel.TensorParallel``. ``weight`` is then this rank's shard, the one that
            ``tp`` was made with. Every rank of the group makes this call with the same hidden states and parameters and
            gets the same token ids. ``seed`` must be given; ``impl`` and ``vocab_size`` belong to ``tp``.
            ``torch.compile`` keeps the call even if its tokens are unused, and keeps the order of such calls; ``tp``
            must be open whenever they run.
        bias: (V,), the LM head's bias, float32, bfloat16 or float16, added in fp32.
        logit_scale: factor of every logit (Cohere; for Granite, which divides, 1 / x).
        soft_cap: c replaces a logit by ``c * tanh(logit / c)`` (Gemma); 0 is off.
        logit_bias: (V,), dtypes as ``bias``, added in all rows; or a pair of token ids (int32 or int64) and values,
            each (B, n), or (n,) for all rows, n up to 1024. Ids out of range, such as -1, are ignored; values of a
            repeated id are summed.
        token_counts: the counts that the penalties read. A ``TokenCounts``: rows 0 to B - 1 are read, and count the
            drawn token; ``num_samples`` must be 1. Or int32 (B, V), not written to: the low 31 bits count a token's
            occurrences in the output, bit 31 says that the prompt has it.
        repetition_penalty: r > 0. Logits of tokens in the prompt or output are divided by r if positive, else
            multiplied by r (Keskar et al. 2019). 1 is off.
        frequency_penalty: subtracted from a logit for every occurrence of its token in the output (OpenAI). 0 is off.
        presence_penalty: subtracted once if the output has the token (OpenAI). 0 is off.
        token_mask: int32 (B, ceil(V / 32)), or one row of it for all. Token t may be drawn if bit t & 31 of word t >> 5
            is set (as in xgrammar, llguidance and vLLM). A row without any allowed token gives -1.
        top_k: keeps the k tokens with the highest logits (Fan et al. 2018). Below 1, or V and above, is off.
        top_p: from 0 to 1. Keeps the fewest most probable tokens, at least one, whose share of the probability that
            top-k keeps reaches p (nucleus sampling, Holtzman et al. 2020). 1 is off.
        min_p: from 0 to 1. Keeps tokens at least that many times as probable as the most probable one (Nguyen et al.
            2024). 0 is off.
        joint_top_p: a bool, or one per row in a list or a tensor of bools or int32 (0 is False). True: the share of
            top-p is of all tokens, whatever top-k keeps, so of both filters the one that keeps fewer decides
            (FlashInfer's ``filter_apply_order="joint"``, and SGLang's order).
        epsilon_cutoff: from 0 to below 1. Keeps tokens whose share of the probability that the other filters keep is at
            least that much, and those as probable as the most probable one (Hewitt et al. 2022; transformers'
            ``EpsilonLogitsWarper``). 0 is off.
        top_n_sigma: n, finite. Keeps tokens whose processed logit, at temperature 1, is at most n standard deviations
            below the highest (top-n-sigma, Tang et al. 2024). The standard deviation is that of the row's finite
            processed logits, divided by their number (llama.cpp's definition). 0 and below is off.
        return_logprobs: returns ``logprobs``, ``processed_logprobs`` and ``ranks`` of the drawn tokens.
        top_logprobs: n up to 20: returns ``top_token_ids`` and ``top_logprobs``.
        logprob_ids: token ids (B, m), int32 or int64, or (m,) for all rows: returns ``given_logprobs``.
        return_logsumexp: returns ``logsumexp``.
        return_kept: returns ``kept_counts`` and ``kept_mask``: the set of tokens that were drawn from.

    The parameters from ``bias`` on are off if they are None, False or left out. They apply in this order: ``bias``,
    ``logit_scale`` and ``soft_cap`` make the raw logits; ``logit_bias``, the penalties and ``token_mask`` make the
    processed logits; then top-n-sigma, the temperature, top-k, top-p, min-p, the epsilon cutoff and the draw. A kept
    token has the score that it has without filters, so a filter that keeps the winner does not change it. Equal logits
    are ordered by id, the lowest first.

    With ``tp`` the parameters cover the whole vocabulary with global ids and are equal on all ranks, with two
    exceptions: ``bias`` is (V_shard,), this rank's part, as ``weight`` is; and of ``token_counts`` a rank reads its
    shard's tokens. The ranks then communicate several times per step (docs/tensor_parallel.md).

    ``triton`` and ``cute`` implement all parameters. ``cute`` runs those that only change logits in one launch; the
    others store the logits.

    ``temperature``, ``seed``, ``offset``, the penalties and the filters take Python and numpy numbers, lists, tuples,
    numpy arrays and tensors. A value per row has shape (B,); shapes () and (1,) count for all rows. The content of
    lists and arrays is checked, and copied to the device in every call: the host waits, and a CUDA graph cannot capture
    the copy. Tensors on the device are read by kernels only: a row with a filter that is NaN there gives -1.

    ``torch.compile`` makes at most two graphs for all values of a number, except for the integers 0 and 1, which have
    their own. A number that changes is a tensor in such a graph: a value that switches its parameter off costs as much
        as one that does not.

    Returns:
        SampleOutput.

    Raises:
        TypeError: an argument has the wrong type or dtype, or there is no such parameter.
        ValueError: a shape, device or range does not fit, or ``impl`` does not support these inputs.
        flashsampling.tensor_parallel.TensorParallelError: the group has failed. TensorParallelTimeout: a rank did not
            join a step. TensorParallelMismatch: a rank was at another step, or passed other parameters. With the
            transport "gloo" the error is about this step, else about an earlier one, whose rows are -1.

    Warns:
        UserWarning: once per process, if several rows that are not greedy share one integer seed and one integer
            offset.

    Example:
        >>> import torch, flashsampling
        >>> hidden_states, weight = torch.zeros(3, 8), torch.zeros(1000, 8)  # all of 1000 tokens are equally likely
        >>> seeds = torch.arange(3)
        >>> flashsampling.sample(hidden_states, weight, temperature=0.8, seed=seeds).token_ids
        tensor([414, 777, 916])
        >>> flashsampling.sample(hidden_states[1:], weight, temperature=0.8, seed=seeds[1:]).token_ids
        tensor([777, 916])
        >>> flashsampling.sample(hidden_states, weight, temperature=0.8, seed=seeds, offset=1).token_ids
        tensor([142, 392, 169])
        >>> weight[7] = 0.5  # a logit of 4; the others stay 0
        >>> out = flashsampling.sample(hidden_states + 1, weight, top_k=[1, 2, 0], seed=seeds, return_logprobs=True)
        >>> out.token_ids
        tensor([  7,   7, 916])
        >>> out.ranks
        tensor([1, 1, 2])
        >>> out.processed_logprobs  # 0: no other token is left
        tensor([ 0.0000, -0.0181, -6.9600])
    """
    options: dict[str, Any] = unknown
    if not (  # the mapping below costs 1.6 us of a call of 14 us
        None is bias is logit_scale  # type: ignore[comparison-overlap] # each may be None
        is soft_cap is logit_bias is token_counts is repetition_penalty
        is frequency_penalty is presence_penalty is token_mask is top_k is top_p is min_p is joint_top_p
        is epsilon_cutoff is top_n_sigma
        is top_logprobs is logprob_ids and return_logprobs is return_logsumexp is return_kept is False
    ):  # fmt: skip
        options |= {
            "bias": bias, "logit_scale": logit_scale, "soft_cap": soft_cap, "logit_bias": logit_bias,
            "token_counts": token_counts, "repetition_penalty": repetition_penalty,
            "frequency_penalty": frequency_penalty, "presence_penalty": presence_penalty, "token_mask": token_mask,
            "top_k": top_k, "top_p": top_p, "min_p": min_p, "joint_top_p": joint_top_p,
            "epsilon_cutoff": epsilon_cutoff, "top_n_sigma": top_n_sigma,
            "return_logprobs": return_logprobs, "top_logprobs": top_logprobs, "logprob_ids": logprob_ids,
            "return_logsumexp": return_logsumexp, "return_kept": return_kept,
        }  # fmt: skip
    return draw(hidden_states, weight, temperature, seed, offset, num_samples, vocab_size, impl, tp, options)


def draw(
    hidden_states: Tensor,  # (B, D)
    weight: Tensor,  # (V, D)
    temperature: Reals,  # or (B,)
    seed: Integers | None,  # or (B,)
    offset: Integers,  # or (B,)
    num_samples: int,
    vocab_size: int | None,
    impl: str | None,
    tp: "TensorParallel | None",
    options: Mapping[str, Any],
) -> SampleOutput:
    """Does what ``sample`` documents. ``options``: its other arguments by name; none if all are off."""
    try:
        batch, vocab, device = check_matrices(hidden_states, weight, 1 if tp is None else 0)
        if tp is not None:
            if seed is None:
                raise ValueError("seed must be given with tp: all ranks need the same")
            check_tensor_parallel(tp, vocab_size, impl)
            tokens, shard = tp.part
        else:
            tokens, shard = check_vocab_size(vocab_size, vocab), WHOLE
            check_impl(impl)
        num_samples = check_num_samples(num_samples)
        temperatures, seeds, offsets = parse_rows(temperature, seed, offset, batch, device, callers=2)
        params = DEFAULT_PARAMS
        if options:
            shape = batch_shape(batch, vocab, tokens, device, num_samples, tp)
            params = parse_sampling_params(options, shape, sample)
        inputs = SampleInputs(hidden_states, weight, temperatures, seeds, offsets, num_samples, tokens, shard, params)
        result = ops.sample(inputs, impl or "") if tp is None else ops.sample_sharded(inputs, tp)
    except BaseException as error:
        ops.count_skipped_call(tp, error)
        raise
    return make_output(result, batch, num_samples, params, options.get("token_counts"))


def sample_from_logits(
    logits: Tensor,  # (B, V)
    *,
    temperature: Reals = 1.0,  # or (B,)
    seed: Integers | None = None,  # or (B,)
    offset: Integers = 0,  # or (B,)
    num_samples: int = 1,
    vocab_size: int | None = None,
    impl: str | None = None,
    bias: Tensor | None = None,  # (V,)
    logit_scale: float | None = None,
    soft_cap: float | None = None,
    logit_bias: LogitBias | None = None,  # (V,), or ids (B, n) and values (B, n)
    token_counts: TokenCounts | Counted | Tensor | None = None,  # (B, V)
    repetition_penalty: Reals | None = None,  # or (B,)
    frequency_penalty: Reals | None = None,  # or (B,)
    presence_penalty: Reals | None = None,  # or (B,)
    token_mask: Tensor | None = None,  # (B, ceil(V / 32))
    top_k: Integers | None = None,  # or (B,)
    top_p: Reals | None = None,  # or (B,)
    min_p: Reals | None = None,  # or (B,)
    joint_top_p: bool | Sequence[bool] | Tensor | None = None,  # or (B,)
    epsilon_cutoff: Reals | None = None,  # or (B,)
    top_n_sigma: Reals | None = None,  # or (B,)
    return_logprobs: bool = False,
    top_logprobs: int | None = None,
    logprob_ids: Any = None,  # (B, m)
    return_logsumexp: bool = False,
    return_kept: bool = False,
    **unknown: "Never",
) -> SampleOutput:
    """Draws token ids from logits that are in memory: the tokens that ``sample`` draws from the LM head that made them.

    It serves LM heads that ``sample`` does not take, such as quantised ones, and logits that other code has changed.
    The noise is the same function of (seed, offset, draw, token id), so equal logits give equal tokens.

    Args:
        logits: (B, V), float32, float16 or bfloat16; rows any stride apart; B may be 0. Not written to.
        vocab_size: number of columns that are tokens; the others are never sampled. At most 2**31 - 1.
        bias, logit_scale, soft_cap: if ``logits`` are not yet what the model makes of its LM head's output.
        impl: "reference", "streaming" or "triton". None chooses by device and inputs. A named backend never falls back.
        temperature, seed, offset, num_samples and all others: as in ``flashsampling.sample``, applied in the same
            order.

    Returns:
        SampleOutput.

    Raises:
        TypeError: an argument has the wrong type or dtype, or there is no such parameter.
        ValueError: a shape, device or range does not fit, or ``impl`` does not support these inputs.

    Warns:
        UserWarning: as ``sample``.

    Example:
        >>> import torch, flashsampling
        >>> hidden_states, weight = torch.ones(3, 8), torch.linspace(-1, 1, 8000).view(1000, 8)
        >>> arguments = {"seed": torch.arange(3), "top_k": [1, 10, 0], "top_p": 0.95}
        >>> flashsampling.sample(hidden_states, weight, **arguments).token_ids
        tensor([999, 995, 916])
        >>> flashsampling.sample_from_logits(hidden_states @ weight.T, **arguments).token_ids
        tensor([999, 995, 916])
    """
    if unknown:
        raise unexpected_argument(next(iter(unknown)), sample_from_logits)
    batch, vocab = check_logits(logits)
    tokens = check_vocab_size(vocab_size, vocab, "logits", "columns")
    num_samples = check_num_samples(num_samples)
    check_impl(impl)
    rows = parse_rows(temperature, seed, offset, batch, logits.device)
    options = {
        "bias": bias, "logit_scale": logit_scale, "soft_cap": soft_cap, "logit_bias": logit_bias,
        "token_counts": token_counts, "repetition_penalty": repetition_penalty,
        "frequency_penalty": frequency_penalty, "presence_penalty": presence_penalty, "token_mask": token_mask,
        "top_k": top_k, "top_p": top_p, "min_p": min_p, "joint_top_p": joint_top_p,
        "epsilon_cutoff": epsilon_cutoff, "top_n_sigma": top_n_sigma,
        "return_logprobs": return_logprobs, "top_logprobs": top_logprobs, "logprob_ids": logprob_ids,
        "return_logsumexp": return_logsumexp, "return_kept": return_kept,
    }  # fmt: skip
    params = parse_sampling_params(options, BatchShape(batch, vocab, tokens, logits.device, num_samples))
    inputs = SampleInputs(logits, logits, *rows, num_samples, tokens, params=params, logits=logits)
    return make_output(ops.sample(inputs, impl or ""), batch, num_samples, params, token_counts)


def parse_rows(
    temperature: Reals, seed: Integers | None, offset: Integers, batch: int, device: torch.device, callers: int = 1
) -> tuple[Tensor | float, Tensor | int, Tensor | int]:
    """Returns temperature, seed and offset as backends take them; a seed of None is drawn. Warns as ``sample``
    documents, at the line ``callers`` calls above the function that calls this one."""
    global _warned_of_shared_noise
    if seed is None:
        seed = torch.randint(-(2**63), 2**63 - 1, (batch,), dtype=torch.int64, device=device)
    temperatures = reals("temperature", temperature, batch, device)
    seeds = integers("seed", seed, batch, device)
    offsets = integers("offset", offset, batch, device)
    shared = batch > 1 and type(seeds) is type(offsets) is int and not torch.compiler.is_compiling()
    if shared and not _warned_of_shared_noise and (isinstance(temperatures, Tensor) or temperatures >= GREEDY_BELOW):
        _warned_of_shared_noise = True
        warnings.warn(
            f"one seed and one offset for {batch} rows: rows with equal hidden states draw equal tokens, and every "
            "call with this seed and offset draws with the same noise. Give every row a seed of its own "
            "(seed=torch.arange(B, device=...), or None) and every step its offset; LMHeadSampler does both. A tensor "
            "of equal seeds says that this is meant",
            UserWarning,
            stacklevel=2 + callers,
        )
    return temperatures, seeds, offsets


def check_matrices(
    hidden_states: Tensor, weight: Tensor, least_rows: int, of_logits: str = "sample_from_logits"
) -> tuple[int, int, torch.device]:
    """Returns B, V and the device. Raises what ``sample`` documents. ``of_logits``: the function that takes logits
    instead of hidden states."""
    if type(hidden_states) is not Tensor or hidden_states.layout is not torch.strided:  # check_kind costs 1 us
        check_kind("hidden_states", hidden_states)
    if type(weight) not in (Parameter, Tensor) or weight.layout is not torch.strided:
        check_kind("weight", weight)
    shape, weight_shape, dtype, device = hidden_states.shape, weight.shape, hidden_states.dtype, hidden_states.device
    if len(shape) != 2:
        hint = "select the positions to sample first, e.g. hidden_states[:, -1]"
        raise ValueError(f"hidden_states must have 2 dimensions, got shape {tuple(shape)}; {hint}")
    if dtype not in DTYPES:
        raise TypeError(f"hidden_states must be bfloat16, float16 or float32, got {dtype}")
    if weight.dtype is not dtype or len(weight_shape) != 2 or weight_shape[0] < least_rows or weight_shape[1] < 1:
        check_weight(weight, least_rows)
        raise TypeError(f"weight must have the dtype of hidden_states, {dtype}, got {weight.dtype}")
    if weight.device != device:
        raise ValueError(f"weight must be on the device of hidden_states, {device}, got {weight.device}")
    (batch, dim), (vocab, columns) = shape, weight_shape
    if dim != columns:
        if dim == vocab > columns:
            raise ValueError(
                f"hidden_states must have the {columns} columns of weight, got shape {tuple(shape)}, that of logits; "
                f"use {of_logits}, which takes them"
            )
        hint = "; it is (D, V): pass weight.T.contiguous()" if dim == vocab else ""
        raise ValueError(f"weight must have the {dim} columns of hidden_states, got shape {tuple(weight_shape)}{hint}")
    return batch, vocab, device


def check_logits(logits: Tensor, name: str = "logits") -> tuple[int, int]:
    """Returns B and V. Raises what ``sample_from_logits`` documents."""
    check_kind(name, logits)
    if logits.ndim != 2:
        hint = "select the positions to sample first, e.g. logits[:, -1]"
        raise ValueError(f"{name} must have 2 dimensions, got shape {tuple(logits.shape)}; {hint}")
    if logits.dtype not in DTYPES:
        raise TypeError(f"{name} must be bfloat16, float16 or float32, got {logits.dtype}")
    if logits.shape[1] < 1:
        raise ValueError(f"{name} must have at least one column, got shape {tuple(logits.shape)}")
    return logits.shape[0], logits.shape[1]


def check_weight(weight: Tensor, least_rows: int = 1) -> None:
    """Raises what ``sample`` documents if a weight fits no hidden states."""
    check_kind("weight", weight)
    dtype, shape = weight.dtype, tuple(weight.shape)
    if dtype not in DTYPES:
        is_quantised = not dtype.is_floating_point or dtype.itemsize == 1
        hint = "; of a quantised head pass the dequantised weight" if is_quantised else ""
        raise TypeError(f"weight must be bfloat16, float16 or float32, got {dtype}{hint}")
    if len(shape) != 2:
        raise ValueError(f"weight must have 2 dimensions, got shape {shape}")
    if shape[0] < least_rows or shape[1] < 1:
        raise ValueError(f"weight must have at least one row and one column, got shape {shape}")


def check_kind(name: str, tensor: object) -> None:
    """Raises TypeError unless the value is a tensor whose memory is its values."""
    if not isinstance(tensor, Tensor):
        hint = f"; pass its .{name}" if isinstance(getattr(tensor, name, None), Tensor) else ""
        if name == "weight" and hint and getattr(tensor, "bias", None) is not None:
            hint += ", and its .bias as bias"
        raise TypeError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}{hint}")
    if hasattr(tensor, "full_tensor"):
        shard = "this rank's rows, weight.to_local(), with tp=TensorParallel(...),"
        what = shard if name == "weight" else "the whole of it,"
        raise TypeError(f"{name} must be a plain tensor, got a DTensor; pass {what} or {name}.full_tensor()")
    if name == "weight" and is_traceable_wrapper_subclass(tensor):
        hint = "of a quantised head pass the dequantised weight, e.g. weight.dequantize()"
        raise TypeError(f"weight must be a plain tensor, got {type(tensor).__name__}; {hint}")
    if not is_dense(tensor):
        hint = "" if tensor.is_nested else f"; pass {name}.to_dense()"
        raise TypeError(f"{name} must be a dense tensor, got {describe_kind(tensor)}{hint}")


def check_vocab_size(vocab_size: int | None, vocab: int, whose: str = "weight", what: str = "rows") -> int:
    """Returns how many of ``vocab`` rows may be sampled. Raises what ``sample`` documents."""
    size = vocab if vocab_size is None else integer("vocab_size", vocab_size)
    if vocab_size is not None and not 1 <= size <= vocab:
        raise ValueError(f"vocab_size must be from 1 to the {vocab} {what} of {whose}, got {size}")
    if size > NO_TOKEN:  # this id says that there is no token
        raise ValueError(
            f"{whose} must have at most 2**31 - 1 {what} that can be sampled, got {size}; vocab_size says how many can"
        )
    return size


def check_num_samples(num_samples: Any) -> int:
    """Returns the number of draws per row. Raises what ``sample`` documents."""
    count = integer("num_samples", num_samples)
    if not 1 <= count <= noise.MAX_DRAWS:
        raise ValueError(f"num_samples must be from 1 to 2**24, got {count}")
    return count


def check_impl(impl: str | None) -> None:
    """Raises what ``sample`` documents."""
    if impl is not None and not isinstance(impl, str):
        raise TypeError(f"impl must be None or a str, got {type(impl).__name__}")
    if impl is not None:
        named(impl)


def check_tensor_parallel(tp: "TensorParallel", vocab_size: int | None, impl: str | None) -> None:
    """Raises what ``sample`` documents."""
    from .tensor_parallel import TensorParallel  # imported already if the caller has one

    if not isinstance(tp, TensorParallel):
        raise TypeError(f"tp must be a flashsampling.tensor_parallel.TensorParallel, got {type(tp).__name__}")
    if vocab_size is not None:
        raise ValueError("vocab_size must be given to TensorParallel, not together with tp")
    if impl is not None and impl != tp.impl:
        raise ValueError(f"impl must be None or tp.impl = {tp.impl!r} with tp, got {impl!r}")
