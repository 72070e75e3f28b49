"""Triton's keys of our functions: the same whatever a process did before, and of all that a function is made of."""

import json

import pytest

pytest.importorskip("triton")

from tests.kernels.triton.target import output_of

KEYS = """
import importlib
import json
import pkgutil
import sys
import triton

MADE = []  # in their order
made = triton.JITFunction.__init__

def init(self, function, **options):
    made(self, function, **options)
    MADE.append(self._fn_name)

triton.JITFunction.__init__ = init
import flashsampling.kernels.triton as package
from flashsampling.kernels.triton import jit

names = sorted(module.name for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."))
if sys.argv[1] == "late":
    import triton.language as tl
    for function in (tl.max, tl.sum, tl.cumsum, tl.flip, tl.reshape):
        getattr(function, "cache_key", None)
    names.reverse()
modules = [importlib.import_module(name) for name in names]
of_modules = [each for module in modules for each in vars(module).values() if isinstance(each, jit._Function)]
functions = sorted({each._fn_name: each for each in of_modules}.values(), key=lambda each: MADE.index(each._fn_name))
keys = {function._fn_name: function.cache_key for function in functions}
assert len(keys) == len(functions)
places = {id(function): place for place, function in enumerate(functions)}
missed = []
for place, function in enumerate(functions):
    read = [function.__globals__.get(name) for name in function.fn.__code__.co_names]
    if any(places.get(id(each), -1) > place for each in read):
        missed.append(function._fn_name)
    seen = [(name, repr(value)) for (name, _), (value, _) in function.used_global_vals.items()]
    function.hash, function.used_global_vals = None, {}
    function.cache_key
    if seen != [(name, repr(value)) for (name, _), (value, _) in function.used_global_vals.items()]:
        missed.append(function._fn_name)
print(json.dumps([keys, missed]))
"""


def test_keys_depend_on_nothing_but_what_functions_are_made_of(tmp_path):
    """Whatever was imported and hashed before; and no function reads what stands below it, which a key would miss."""
    (early, missed), (late, _) = (json.loads(output_of(KEYS, order, cache=tmp_path)) for order in ("early", "late"))
    assert len(early) > 150
    assert early == late
    assert not missed


def test_all_functions_are_hashed_when_they_are_defined():
    """``triton.jit`` itself is for modules of one function that calls nothing of ours."""
    from pathlib import Path

    import flashsampling

    package = Path(flashsampling.__file__).parent
    plain = {
        path.relative_to(package).as_posix() for path in package.rglob("*.py") if "@triton.jit" in path.read_text()
    }
    assert plain == {"integrations/engine/kernels.py", "integrations/vllm/kernels.py"}
