"""Private parts of torch: the package imports none, and serves with a release that lacks one."""

import ast
import importlib
import runpy
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from flashsampling import ops, sample, torch_internals

PACKAGE = Path(torch_internals.__file__).parent
C = "torch._C"
PRIVATE = {
    "tracing_state": (C, "_get_tracing_state"),
    "dispatch_modes": (C, "_len_torch_dispatch_stack"),
    "function_modes": (C, "_len_torch_function_stack"),
    "functorch_is_active": (C, "_are_functorch_transforms_active"),
    "register_dataclass": ("torch.utils._pytree", "register_dataclass"),
    "is_traceable_wrapper_subclass": ("torch.utils._python_dispatch", "is_traceable_wrapper_subclass"),
}


def _private_imports(code):
    """Names of what is private to torch in import statements, and in attributes that are read as a module is
    imported."""
    for node in ast.walk(code):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        yield from (name for name in names if name.startswith("torch.") and "._" in name)


def test_the_package_imports_nothing_private_of_torch():
    sources = sorted(PACKAGE.rglob("*.py"))
    assert len(sources) > 100
    found = {(str(source), name) for source in sources for name in _private_imports(ast.parse(source.read_bytes()))}
    assert not found


@pytest.fixture
def degraded(request, monkeypatch):
    """The module as it is where torch lacks a function: what takes its place."""
    module, name = PRIVATE[request.param]
    with monkeypatch.context() as patched:
        patched.delattr(importlib.import_module(module), name)
        names = runpy.run_path(torch_internals.__file__)
    assert [other for other in PRIVATE if names[other] is not getattr(torch_internals, other)] == [request.param]
    return names[request.param]


@pytest.mark.parametrize("degraded", list(PRIVATE)[:4], indirect=True)
def test_without_one_calls_go_through_the_dispatcher(monkeypatch, degraded, request):
    name = request.node.callspec.params["degraded"]
    states, weight = torch.randn(3, 8), torch.randn(50, 8)
    expected = sample(states, weight, seed=torch.arange(3)).token_ids
    monkeypatch.setattr(ops, name, degraded)
    undispatched, nobody_looks = [], ops._is_untraced

    def noted(step):
        undispatched.append(nobody_looks(step))
        return undispatched[-1]

    monkeypatch.setattr(ops, "_is_untraced", noted)
    assert torch.equal(sample(states, weight, seed=torch.arange(3)).token_ids, expected)
    assert undispatched == [name == "tracing_state"]  # which torch says publicly too


@pytest.mark.parametrize("degraded", ["register_dataclass"], indirect=True)
def test_without_it_outputs_are_pytrees(degraded):
    @dataclass
    class Output:
        ids: torch.Tensor
        others: torch.Tensor | None = None

    degraded(Output, serialized_type_name="tests.Output")
    leaves, _ = torch.utils._pytree.tree_flatten(Output(torch.ones(2)))
    assert any(leaf is not None and torch.equal(leaf, torch.ones(2)) for leaf in leaves)


@pytest.mark.parametrize("degraded", ["is_traceable_wrapper_subclass"], indirect=True)
def test_without_it_wrappers_are_told_from_tensors(degraded):
    from torch.testing._internal.two_tensor import TwoTensor

    values = [torch.ones(2), torch.nn.Parameter(torch.ones(2)), TwoTensor(torch.ones(2), torch.ones(2))]
    told = [degraded(value) for value in values]
    assert told == [torch_internals.is_traceable_wrapper_subclass(value) for value in values] == [False, False, True]


def test_a_fake_tensor_is_plain_and_nothing_else_of_that_name():
    from torch._subclasses.fake_tensor import FakeTensorMode

    from flashsampling.row_params import is_plain

    with FakeTensorMode():
        assert is_plain(torch.empty(2))

    class FakeTensor(torch.Tensor):
        pass

    assert not is_plain(torch.empty(2).as_subclass(FakeTensor))
