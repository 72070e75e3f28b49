"""The oracle: transformers' own decoding and processors on its own logits in memory, with the contract's noise."""

from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList

from flashsampling import noise


class GumbelNoise(LogitsProcessor):
    """Behind all warpers of a sampling decoder: greedy decoding of what it returns is sampling."""

    def __init__(self, seeds: Tensor) -> None:
        self.seeds, self.step = seeds, 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        offsets, draw = torch.full_like(self.seeds, self.step), torch.zeros(1, dtype=torch.int64, device=scores.device)
        self.step += 1
        return scores + noise.gumbel(self.seeds, offsets, draw, 0, scores.shape[-1])[:, 0]


def plain(model: Any, seeds: Tensor | None, **options: Any) -> Any:
    """``model.generate`` without us; ``seeds``: one per returned sequence, None is greedy."""

    def decode(
        model: Any, input_ids: Tensor, *arguments: Any, logits_processor: Any, generation_config: Any, **rest: Any
    ) -> Any:
        sampled = [GumbelNoise(seeds)] if seeds is not None else []
        generation_config.do_sample = False
        processors = LogitsProcessorList([*logits_processor, *sampled])
        return model._sample(
            input_ids, *arguments, logits_processor=processors, generation_config=generation_config, **rest
        )  # fmt: skip

    return model.generate(**{"do_sample": seeds is not None} | options, custom_generate=decode)
