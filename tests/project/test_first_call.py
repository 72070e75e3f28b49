"""The benchmark of first calls: every mix is valid, and kernels are compiled and counted without a GPU."""

import pytest
import torch

pytest.importorskip("triton")
pytest.importorskip("typer")
pytest.importorskip("rich")

from benchmarks.first_call import MIXES, Case, arguments, measure
from flashsampling import sample, sample_from_logits

VOCAB, DIM, BATCH = 100, 8, 3


@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize("mix", MIXES)
def test_a_mix_is_what_the_functions_take(mix, rows):
    weight, states = torch.randn(VOCAB, DIM), torch.randn(BATCH, DIM)

    def options():
        return arguments(mix, BATCH, VOCAB, weight.device, rows)

    drawn = sample(states, weight, **options()).token_ids
    assert torch.equal(drawn, sample_from_logits(states @ weight.T, **options()).token_ids)
    others = arguments(mix, BATCH, VOCAB, weight.device, not rows)
    assert torch.equal(drawn, sample(states, weight, **others).token_ids)
    assert isinstance(options()["temperature"], torch.Tensor) == rows


@pytest.mark.quick(0)
def test_the_kernels_of_a_first_call():
    """Of other calls they are counted; tensors instead of numbers need none."""
    found = measure(Case("logits float32", "plain", [1000, 2000], [2, 3], DIM, 90))
    assert set(found) == {"first", "V=2000", "B=3", "rows"}
    kernels = found["first"]["kernels"]
    assert len(kernels) >= 1
    for kernel in kernels:
        assert kernel["name"]
        assert kernel["ptx_lines"] > 0
        assert 0 < kernel["seconds"] < found["first"]["seconds"]
    assert len(found["rows"]["kernels"]) == 0
