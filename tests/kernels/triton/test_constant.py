"""Constants that kernels read: none is of the class that a launch takes long to compare, and a change is still seen."""

import copy
import importlib
import pkgutil
from operator import ne

import pytest

pytest.importorskip("triton")
import triton.language as tl

import flashsampling.kernels.triton
from flashsampling.kernels.triton.constant import Constant

PACKAGE = flashsampling.kernels.triton
MODULES = [name for _, name, _ in pkgutil.walk_packages(PACKAGE.__path__, PACKAGE.__name__ + ".")]


@pytest.mark.parametrize("name", MODULES)
def test_every_one_is_quick_to_compare(name):
    module = importlib.import_module(name)
    found = {key: value for key, value in vars(module).items() if isinstance(value, tl.constexpr)}
    assert {key for key, value in found.items() if type(value) is not Constant} == set()


def test_there_are_some():
    from flashsampling.kernels.triton.fused import noise

    assert sum(type(value) is Constant for value in vars(noise).values()) > 10


def test_triton_s_check_sees_a_change():
    """As ``JITFunction.run`` asks: of a copy."""
    one = Constant(5)
    before = copy.deepcopy(one)
    assert type(before) is Constant
    assert ne(one, before) is False
    assert ne(Constant(6), before) is True
    assert ne(one, tl.constexpr(6))
    assert not ne(one, tl.constexpr(5))
    assert not ne(tl.constexpr(5), one)
