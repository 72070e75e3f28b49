"""The fused step of a batch: what ``flashsampling.sample`` is called with, and in which mixes, so that all can be warmed up.

A mix is what kernels are compiled for. There are few: where one row has a filter all have all three, where one has a bias or a
mask all have both, and what is off for a row is exactly off. A batch of the same requests as in the last step finds their
parameters on the device.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...param_parsers import MAX_BIASED
from ...sampling import sample
from ...warmup import warmup_mixes
from ..engine.common import bias_of_rows, biases_now, sanitize_token_ids, to_device
from .head import Head
from .request_info import Needs, RequestInfo

_FEW = 64  # biased tokens
_INTEGERS = ("top_k", "joint_top_p")
_FLOATS = ("temperature", "top_p", "min_p", "raw", "divisor")
_LOWEST = torch.finfo(torch.float32).min  # SGLang returns no log-probability below


class KernelVariant(NamedTuple):
    """What a batch's call asks for. None of it: filters."""

    biases: int = 0  # tokens with one, of a row; with them a mask
    logprobs: bool = False
    joint: bool = True  # some row has a top-p of all tokens and a top-k; with biases or log-probabilities always


VARIANTS = (
    KernelVariant(joint=False),
    *(KernelVariant(biases, logprobs) for biases in (0, _FEW, MAX_BIASED) for logprobs in (False, True)),
)


class Batch(NamedTuple):
    """Rows of a step, each the last position of a request."""

    hidden_states: Tensor  # (B, D)
    positions: Tensor  # (B,) int64, of the token that is read: the offset
    noted: tuple[RequestInfo, ...]  # B
    lengths: Tensor  # (B,), on the host: tokens of the sequence up to that position
    mask: Tensor | None  # (B, ceil(V / 32)) int32, of the grammars
    top_logprobs: int | None  # of the row that asks for the most; None: no log-probabilities are asked for


class SampleResult(NamedTuple):
    """What SGLang needs of a step."""

    token_ids: Tensor  # (B,) int64, -1 nowhere
    logprobs: Tensor | None = None  # (B,) float32, of them
    top_token_ids: Tensor | None = None  # (B, n)
    top_logprobs: Tensor | None = None  # (B, n)


class FusedStep:
    """Steps of one model runner."""

    def __init__(self, head: Head, device: torch.device) -> None:
        self.head, self.device = head, device
        self.words = -(-head.vocab_size // 32)
        self.undefined = torch.zeros(1, dtype=torch.int64, device=device)
        self._last: tuple[tuple[RequestInfo, ...], dict[str, Tensor], Needs] = ((), {}, Needs(0))

    def draw(self, batch: Batch) -> SampleResult:
        """Draws for every row."""
        rows, wants = self._rows(batch.noted)
        request: dict[str, Any] = dict(self.head.transform)
        top = batch.top_logprobs
        if wants & (Needs.FILTERS | Needs.BIASES) or batch.mask is not None or top is not None:
            request |= {name: rows[name] for name in ("top_k", "top_p", "min_p")}
            if wants & Needs.BIASES or batch.mask is not None:
                request |= self._changes(batch)
            if wants & (Needs.JOINT | Needs.BIASES) or batch.mask is not None or top is not None:
                request["joint_top_p"] = rows["joint_top_p"]
            if top is not None:
                request |= {"return_logprobs": True, "top_logprobs": max(top, 1)}
        out = sample(
            batch.hidden_states,
            self.head.weight,
            temperature=rows["temperature"],
            seed=rows["seed"],
            offset=batch.positions,
            vocab_size=self.head.vocab_size,
            **request,
        )
        token_ids, _ = sanitize_token_ids(out.token_ids, self.undefined)
        if top is None:
            return SampleResult(token_ids)
        assert out.logprobs is not None
        assert out.processed_logprobs is not None
        assert out.top_token_ids is not None
        assert out.top_logprobs is not None
        logprobs = torch.where(rows["raw"] != 0, out.logprobs, out.processed_logprobs)
        # log softmax at a temperature is the raw one divided by it, but for a constant, which the drawn token has too
        constant = logprobs - out.logprobs / rows["divisor"]
        tops = out.top_logprobs[:, :top] / rows["divisor"][:, None] + constant[:, None]
        return SampleResult(token_ids, logprobs.clamp(min=_LOWEST), out.top_token_ids[:, :top], tops.clamp(min=_LOWEST))

    def _rows(self, noted: tuple[RequestInfo, ...]) -> tuple[dict[str, Tensor], Needs]:
        """Parameters of the rows, (B,) each, copied to the device together, if they are others than in the last step; and what
        all of them want."""
        last, rows, wants = self._last
        if noted == last:
            return rows, wants
        wants = Needs(0)
        for each in noted:
            wants |= each.wants
        columns = list(zip(*(each.row for each in noted)))
        seeds, temperature, top_k, top_p, min_p, joint, raw, divisor = columns
        batch = len(noted)
        # every column begins at 16 bytes, as kernels are compiled for; the first two hold the seeds
        packed = np.zeros((2 + len(_INTEGERS) + len(_FLOATS), -(-batch // 4) * 4), np.int32)
        packed[:2].reshape(-1)[: 2 * batch].view(np.int64)[:] = seeds
        packed[2:4, :batch] = (top_k, joint)
        packed[4:, :batch].view(np.float32)[:] = (temperature, top_p, min_p, raw, divisor)
        there = to_device(packed, self.device)
        rows = {"seed": there[:2].view(-1).view(torch.int64)[:batch]} | dict(
            zip(_INTEGERS, there[2:4, :batch].unbind(0))
        )
        rows |= dict(zip(_FLOATS, there[4:, :batch].view(torch.float32).unbind(0)))
        self._last = noted, rows, wants
        return rows, wants

    def _changes(self, batch: Batch) -> dict[str, Any]:
        """Biases and the mask, as ``sample`` takes them."""
        of_rows = [biases_now(noted.biases, length) for noted, length in zip(batch.noted, batch.lengths.tolist())]
        most = max(len(ids) for ids, _ in of_rows)
        count = _FEW if most <= _FEW else MAX_BIASED
        ids, values = bias_of_rows(of_rows, len(of_rows), count)
        mask = batch.mask
        if mask is None:
            mask = torch.full((len(of_rows), self.words), -1, dtype=torch.int32, device=self.device)
        return {"logit_bias": (to_device(ids, self.device), to_device(values, self.device)), "token_mask": mask}

    def warm_up(self, max_batch_size: int) -> list[str]:
        """Compiles what any batch of up to as many rows needs. Returns the kernels' names."""
        sanitize_token_ids(torch.zeros(max_batch_size, dtype=torch.int64, device=self.device), self.undefined)
        requests: list[Any] = [self.head.transform]
        requests += [{**self.head.transform, **self._example_of(mix, max_batch_size)} for mix in VARIANTS]
        return warmup_mixes(self.head.weight, requests, max_batch_size=max_batch_size, vocab_size=self.head.vocab_size)

    def _example_of(self, mix: KernelVariant, batch: int) -> dict[str, Any]:
        """What a call of this mix has, as ``warmup`` takes it."""
        zeros, ones = torch.zeros(batch, device=self.device), torch.ones(batch, device=self.device)
        request: dict[str, Any] = {"top_k": zeros.int(), "top_p": ones, "min_p": zeros}
        if mix.joint:
            request["joint_top_p"] = zeros.int()
        if mix.biases:
            ids = torch.full((batch, mix.biases), -1, dtype=torch.int32, device=self.device)
            request["logit_bias"] = ids, torch.zeros(ids.shape, device=self.device)
            request["token_mask"] = torch.full((batch, self.words), -1, dtype=torch.int32, device=self.device)
        if mix.logprobs:
            request |= {"return_logprobs": True, "top_logprobs": 1}
        return request
