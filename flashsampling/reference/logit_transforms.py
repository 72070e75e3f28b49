"""Logit transforms and filters: pure functions of rows of logits in memory, on any device. Contract, section 5.

    hidden_states @ weight.T -> raw -> processed -> kept -> drawn

Nothing waits for the device. Parameters are (B,) tensors or numbers, which count as float32. Probabilities are summed
in float64.

Top-k: Fan, Lewis and Dauphin, "Hierarchical Neural Story Generation", ACL 2018. Top-p: Holtzman et al., "The Curious
Case of Neural Text Degeneration", ICLR 2020. Min-p: Nguyen et al., "Turning Up the Heat", 2024. Epsilon cutoff: Hewitt,
Manning and Liang, "Truncation Sampling as Language Model Desmoothing", EMNLP 2022. Top-n-sigma: Tang et al., "Not All
Logits Are You Need", 2024. Repetition penalty: Keskar et al., "CTRL", 2019. Frequency and presence penalties: OpenAI's
API.
"""

import torch
from torch import Tensor

from ..sampling_params import SamplingParams

GREEDY_BELOW = 1e-6
_COUNT = 0x7FFFFFFF


def column(value: Tensor | float, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    """Returns (B, 1), or (1, 1) for a number, in a way that a CUDA graph can capture."""
    if isinstance(value, Tensor):
        return value[:, None]
    return torch.full((1, 1), value, dtype=dtype, device=device)


def raw(
    logits: Tensor,  # (B, V) hidden_states @ weight.T
    params: SamplingParams,
) -> Tensor:
    """Returns (B, V) logits after the LM head's bias, scale and soft cap."""
    if params.bias is not None:
        logits = logits + params.bias[: logits.shape[1]]
    if params.logit_scale != 1.0:
        logits = logits * params.logit_scale
    if params.soft_cap:
        logits = params.soft_cap * torch.tanh(logits / params.soft_cap)
    return logits


def allowed(params: SamplingParams, vocab_size: int) -> Tensor | None:
    """Returns (B, V) bool: the tokens that the mask allows; None: all."""
    if params.token_mask is None:
        return None
    bits = params.token_mask[:, :, None] >> torch.arange(32, dtype=torch.int32, device=params.token_mask.device) & 1
    return bits.flatten(1)[:, :vocab_size].bool()


def processed(
    raw: Tensor,  # (B, V)
    params: SamplingParams,
) -> Tensor:
    """Returns (B, V) logits after logit bias, penalties and mask: -inf where a token is not allowed."""
    logits, vocab_size = raw, raw.shape[1]
    if params.dense_bias is not None:
        logits = logits + params.dense_bias[:vocab_size]
    if params.bias_ids is not None and params.bias_values is not None:
        there = (params.bias_ids >= 0) & (params.bias_ids < vocab_size)
        ids, values = torch.where(there, params.bias_ids, 0).long(), torch.where(there, params.bias_values, 0.0)
        logits = logits.scatter_add(1, ids, values.to(logits.dtype))
    logits = penalised(logits, params)
    mask = allowed(params, vocab_size)
    return logits if mask is None else logits.masked_fill(~mask, float("-inf"))


def penalised(
    logits: Tensor,  # (B, V)
    params: SamplingParams,
) -> Tensor:
    """Returns (B, V) logits after the penalties. No penalty, not even NaN, changes a token that has no count."""
    if params.counts is None:
        return logits
    counts = params.counts if params.counts_rows is None else params.counts.index_select(0, params.counts_rows)
    counts = counts[:, : logits.shape[1]]
    repetition, frequency, presence = (
        column(value, logits.device)
        for value in (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
    )
    logits = torch.where(counts != 0, torch.where(logits > 0, logits / repetition, logits * repetition), logits)
    times = counts & _COUNT
    return torch.where(times > 0, logits - frequency * times - presence, logits)


def relative(
    logits: Tensor,  # (B, V)
    temperature: Tensor,  # (B,) float32
) -> Tensor:
    """Returns (B, V) float64: log(p(token) / p(best token)), at most 0. A greedy row is taken at temperature 1. The
    first +inf of a row has all the probability, later ones none."""
    wide = logits.double()
    scale = torch.where(temperature < GREEDY_BELOW, 1.0, temperature).double()[:, None]
    best, first = wide.max(dim=-1, keepdim=True)  # the first index of a tie
    later = wide.isposinf().scatter(-1, first, False)
    below = torch.where(wide == best, 0.0, (wide - best) / scale)
    below = torch.where(wide.isneginf(), wide, below)  # at an infinite temperature too
    return below.masked_fill(later, float("-inf"))


def share_of_best(
    below: Tensor,  # float64, from 0 down: ``relative``
) -> Tensor:
    """Returns float64: p(token) / p(best token). It is correctly rounded next to 1, as min-p of 1 needs: torch's
    exponential is an ulp off there on processors with AVX-512."""
    return torch.where(below > -(2.0**-30), 1.0 + below, below.exp())


def kept(
    logits: Tensor,  # (B, V), processed
    temperature: Tensor,  # (B,) float32
    top_k: Tensor | int = 0,
    top_p: Tensor | float = 1.0,
    min_p: Tensor | float = 0.0,
    joint_top_p: Tensor | int = 0,
    epsilon_cutoff: Tensor | float = 0.0,
    top_n_sigma: Tensor | float = 0.0,
) -> Tensor:
    """Returns (B, V) bool: the tokens that the filters keep, in each row at least the first one.

    Tokens are ordered by descending logit, equal ones by ascending id. Top-n-sigma keeps the logits from
    ``sigma_cutoff`` on. Top-k keeps the first k. Top-p keeps the shortest prefix whose share of what both keep
    (``joint_top_p``: of what the first keeps) reaches p. Min-p keeps tokens with at least ``min_p`` times the first
    one's probability. The epsilon cutoff keeps those whose share of what is left reaches epsilon, and those as probable
    as the first.
    """
    device, vocab_size = logits.device, logits.shape[1]
    ordered, ids = (logits + 0.0).sort(dim=-1, descending=True, stable=True)  # + 0.0: -0.0 and 0.0 are equal
    places = torch.arange(vocab_size, device=device)
    k, p, ratio = column(top_k, device, torch.int64), column(top_p, device), column(min_p, device)
    in_top_k = (places < k) | (k <= 0)
    of_all = column(joint_top_p, device, torch.int64) != 0
    in_sigma = ~(ordered < sigma_cutoff(logits, top_n_sigma))
    share = share_of_best(relative(ordered, temperature))
    mass = torch.where((in_top_k | of_all) & in_sigma, share, 0.0)
    before = mass.cumsum(dim=-1) - mass
    in_top_p = (before < p.double() * mass.sum(dim=-1, keepdim=True)) | (p >= 1)
    in_min_p = mass >= ratio.double()  # a ratio up to 0 keeps all
    keep = in_sigma & in_top_k & in_top_p & in_min_p | (places == 0)
    epsilon = column(epsilon_cutoff, device).double()
    least = (epsilon * torch.where(keep, share, 0.0).sum(dim=-1, keepdim=True)).clamp(max=1.0)
    keep = keep & ((share >= least) | (epsilon <= 0)) | (places == 0)
    return torch.zeros_like(keep).scatter_(-1, ids, keep)


def sigma_cutoff(
    logits: Tensor,  # (B, V)
    top_n_sigma: Tensor | float,
) -> Tensor:
    """Returns (B, 1) float32: n standard deviations of the finite logits below the highest one; -inf where n is off."""
    n, wide = column(top_n_sigma, logits.device), logits.double()
    finite = logits.isfinite()
    count = finite.sum(dim=-1, keepdim=True)
    mean = torch.where(finite, wide, 0.0).sum(dim=-1, keepdim=True) / count
    sigma = (torch.where(finite, wide - mean, 0.0).square().sum(dim=-1, keepdim=True) / count).sqrt()
    cutoff = wide.amax(dim=-1, keepdim=True) - n.clamp(max=torch.finfo(torch.float32).max).double() * sigma
    return torch.where(n <= 0, float("-inf"), cutoff.float())


def has_undefined_filter(
    params: SamplingParams,
    device: torch.device,
) -> Tensor:
    """Returns (B,) or (1,) bool: whether a filter of the row is NaN."""
    undefined = torch.zeros(1, dtype=torch.bool, device=device)
    for value in params.filter_values().values():
        if isinstance(value, Tensor):
            undefined = undefined | value.isnan()
    return undefined


def logprobs(
    logits: Tensor,  # (B, V)
) -> Tensor:
    """Returns (B, V) float32: log softmax. A row that holds a NaN is all NaN."""
    wide = logits.double()
    return (wide - wide.logsumexp(dim=-1, keepdim=True)).float()


def kept_logprobs(
    logits: Tensor,  # (B, V), processed
    temperature: Tensor,  # (B,) float32
    kept: Tensor | None,  # (B, V) bool; None: all
) -> Tensor:
    """Returns (B, V) float32: log softmax of ``logits / temperature`` over the kept tokens, -inf elsewhere. A greedy
    row is taken at temperature 1."""
    below = relative(logits, temperature)
    if kept is not None:
        below = below.masked_fill(~kept, float("-inf"))
    return (below - below.logsumexp(dim=-1, keepdim=True)).float()


def drawn_from(
    logits: Tensor,  # (B, V), processed
    temperature: Tensor,  # (B,) float32
    kept: Tensor | None,  # (B, V) bool; None: all
) -> Tensor:
    """Returns (B, V) bool: the kept tokens that have a probability; of a greedy row, or one with an infinite logit, the
    first of the highest."""
    some = ~logits.isneginf() if kept is None else kept & ~logits.isneginf()
    best = logits.amax(dim=-1, keepdim=True)
    first = (logits == best).int().argmax(dim=-1, keepdim=True)
    only = torch.zeros_like(some).scatter_(-1, first, True)
    alone = (temperature < GREEDY_BELOW)[:, None] | best.isposinf()
    return torch.where(alone, only, some)


def pack_bits(mask: Tensor) -> Tensor:
    """Returns (B, ceil(V / 32)) int64 words, in the range of int32, of a mask (B, V) bool."""
    bits = torch.nn.functional.pad(mask, (0, -mask.shape[1] % 32)).view(mask.shape[0], -1, 32).long()
    words = (bits << torch.arange(32, device=mask.device)).sum(dim=-1)
    return torch.where(words >= 2**31, words - 2**32, words)


def ranks(
    logits: Tensor,  # (B, V)
    ids: Tensor,  # (B, S) int64
) -> Tensor:
    """Returns (B, S) int64: 1 + the number of tokens with a larger logit; -1 where the id is -1."""
    ordered = torch.where(logits.isnan(), float("-inf"), logits).sort(dim=-1).values.contiguous()
    up_to = torch.searchsorted(ordered, logits.gather(1, ids.clamp(min=0)), right=True)
    return torch.where(ids < 0, -1, 1 + logits.shape[1] - up_to)


def at(
    values: Tensor,  # (B, V)
    ids: Tensor,  # (B, m) int64
) -> Tensor:
    """Returns (B, m): the values at these ids, NaN for an id out of range."""
    there = (ids >= 0) & (ids < values.shape[1])
    return torch.where(there, values.gather(1, torch.where(there, ids, 0)), float("nan"))


def top(
    logits: Tensor,  # (B, V)
    count: int,  # up to V
) -> Tensor:
    """Returns (B, count) int64: the ids with the highest logits, the lowest of equal ones; a row that holds a NaN is
    all -1."""
    ids = (logits + 0.0).sort(dim=-1, descending=True, stable=True).indices[:, :count]
    return ids.masked_fill(logits.isnan().any(dim=-1, keepdim=True), -1)
