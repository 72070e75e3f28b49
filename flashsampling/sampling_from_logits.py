"""``sample_from_logits``: the same draw, where the logits are in memory already."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from . import ops
from .inputs import SampleInputs
from .reference.logit_transforms import GREEDY_BELOW
from .row_params import Integers, Reals, integers, reals
from .sampling import (
    DTYPES,
    SampleOutput,
    check_impl,
    check_kind,
    check_num_samples,
    check_vocab_size,
    output_of,
    say_that_noise_is_shared,
)
from .sampling_params import BatchShape, Request, parse_sampling_params

if TYPE_CHECKING:
    from typing_extensions import Unpack  # typing's from Python 3.11 on; torch brings this one


def sample_from_logits(
    logits: Tensor,  # (B, V)
    *,
    temperature: Reals = 1.0,  # or (B,)
    seed: Integers | None = None,  # or (B,)
    offset: Integers = 0,  # or (B,)
    num_samples: int = 1,
    vocab_size: int | None = None,
    impl: str | None = None,
    **request: "Unpack[Request]",
) -> SampleOutput:
    """Draws token ids from logits that are in memory already: what ``sample`` draws from the head that they come from.

    For heads that ``sample`` does not take, as quantised ones, and for logits that something else has changed. The noise is the
    same function of (seed, offset, draw, token id), so from equal logits both draw the same token.

    Args:
        logits: (B, V), float32, float16 or bfloat16; rows any stride apart; B may be 0. Not written to.
        vocab_size: how many of the columns are tokens; the others are never sampled. At most 2**31 - 1.
        bias, logit_scale, soft_cap: where ``logits`` are not yet what the model makes of its head's output.
        impl: "reference", "streaming" or "triton". None chooses by device and problem; a name never falls back.
        temperature, seed, offset, num_samples and all others: as in ``flashsampling.sample``, in the same order.

    Returns:
        SampleOutput.

    Raises:
        TypeError: an argument is of the wrong type or dtype.
        ValueError: a shape, device or range does not fit, or ``impl`` cannot do this problem.

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
    batch, vocab = check_logits(logits)
    device = logits.device
    tokens = check_vocab_size(vocab_size, vocab, "logits", "columns")
    num_samples = check_num_samples(num_samples)
    check_impl(impl)
    if seed is None:
        seed = torch.randint(-(2**63), 2**63 - 1, (batch,), dtype=torch.int64, device=device)
    temperatures = reals("temperature", temperature, batch, device)
    seeds = integers("seed", seed, batch, device)
    offsets = integers("offset", offset, batch, device)
    if batch > 1 and not (isinstance(seeds, Tensor) or isinstance(offsets, Tensor) or torch.compiler.is_compiling()):
        say_that_noise_is_shared(batch, greedy=not isinstance(temperatures, Tensor) and temperatures < GREEDY_BELOW)
    params = parse_sampling_params(request, BatchShape(batch, vocab, tokens, device, num_samples), sample_from_logits)
    step = SampleInputs(logits, logits, temperatures, seeds, offsets, num_samples, tokens, params=params, logits=logits)
    return output_of(ops.sample(step, impl or ""), batch, num_samples, params, request.get("token_counts"))


def check_logits(logits: Tensor, name: str = "logits") -> tuple[int, int]:
    """B and V. Raises what ``sample_from_logits`` documents."""
    check_kind(name, logits)
    if logits.ndim != 2:
        hint = "select the positions to sample first, e.g. logits[:, -1]"
        raise ValueError(f"{name} must have 2 dimensions, got shape {tuple(logits.shape)}; {hint}")
    if logits.dtype not in DTYPES:
        raise TypeError(f"{name} must be bfloat16, float16 or float32, got {logits.dtype}")
    if logits.layout is not torch.strided:
        raise TypeError(f"{name} must be a dense tensor, got {logits.layout}")
    if logits.shape[1] < 1:
        raise ValueError(f"{name} must have at least one column, got shape {tuple(logits.shape)}")
    return logits.shape[0], logits.shape[1]
