"""SGLang's requests as rows of the fused step, and log-probabilities as SGLang returns them."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..engine.kernel_variants import FILTERS, Rows
from ..engine.request_info import NO_BIASES, BiasRow, Needs, RequestInfo
from ..engine.step import Batch, FusedStep
from ..engine.transfer import INTEGERS, aligned_width, pack_rows, to_device, unpack_rows

_LOWEST = torch.finfo(torch.float32).min  # SGLang returns no lower log-probability


class DrawnTokens(NamedTuple):
    """The result of a step for SGLang."""

    token_ids: Tensor  # (B,) int64, 0 in place of -1
    logprobs: Tensor | None = None  # (B,) float32, of them
    top_token_ids: Tensor | None = None  # (B, n)
    top_logprobs: Tensor | None = None  # (B, n)


class SglangStep(FusedStep):
    """Steps of one of SGLang's model runners. Requests are a tuple of ``RequestInfo``, grammars masks (B, words)
    int32."""

    row_names = ("temperature", *FILTERS, "joint_top_p", "raw", "divisor")

    def draw_tokens(self, batch: Batch) -> DrawnTokens:
        """Draws for every row."""
        out: Any
        out, top = self.draw(batch)
        token_ids, _ = self.sanitize_token_ids(out.token_ids)
        if top is None:
            return DrawnTokens(token_ids)
        assert self.batch_cache is not None
        rows = self.batch_cache.rows
        logprobs = torch.where(rows["raw"] != 0, out.logprobs, out.processed_logprobs)
        # log softmax at a temperature is the raw one divided by it, but for a constant, which the drawn token has too
        constant = logprobs - out.logprobs / rows["divisor"]
        tops = out.top_logprobs[:, :top] / rows["divisor"][:, None] + constant[:, None]
        return DrawnTokens(token_ids, logprobs.clamp(min=_LOWEST), out.top_token_ids[:, :top], tops.clamp(min=_LOWEST))

    def read_requests(self, requests: tuple[RequestInfo, ...], out: Tensor | None) -> tuple[int, int | None, Rows]:
        """Returns what the rows need together, and parameters. The batch says which log-probabilities."""
        needs = 0
        for each in requests:
            needs |= each.needs
        seeds, *columns = zip(*(each.row for each in requests))
        dtypes = (np.int32 if name in INTEGERS else np.float32 for name in self.row_names)
        arrays = [np.array(column, dtype) for column, dtype in zip(columns, dtypes)]
        packed = to_device(pack_rows(np.array(seeds, np.int64), arrays, aligned_width(len(requests))), self.device, out)
        return needs & ~Needs.LOGPROBS, None, unpack_rows(packed, len(requests), self.row_names)

    def read_biases(self, batch: Batch) -> tuple[Sequence[BiasRow], NDArray[np.int64] | None]:
        """Returns biases of each row."""
        held = [each.biases for each in batch.requests]
        return [NO_BIASES if each is None else each.at(n) for each, n in zip(held, batch.lengths.tolist())], None

    def read_mask(self, batch: Batch, out: Tensor | None = None) -> Tensor:
        """Returns the grammars' masks."""
        return batch.grammar  # type: ignore[no-any-return]
