"""Makes up the packages that SGLang's Python files import and that a machine without a GPU has not, so that its classes
load.

Importing this does so, or raises ImportError where SGLang's files are not, or a GPU is; but with
FLASHSAMPLING_SGLANG_STAND_INS=1 a GPU does not matter: see ``sglang_engine``.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import types
from unittest.mock import MagicMock

import torch
import transformers
from transformers.utils import import_utils

STAND_INS = os.environ.get("FLASHSAMPLING_SGLANG_STAND_INS") == "1"
if importlib.util.find_spec("sglang") is None or (torch.cuda.is_available() and not STAND_INS):
    raise ImportError("needs SGLang's Python files, and no GPU")


class _Module(types.ModuleType):
    """Has every name."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        made = MagicMock(name=f"{self.__name__}.{name}")
        setattr(self, name, made)
        return made


class _MakesUp(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Behind all other finders: what SGLang imports and nobody has. What others look for is not there, as ever."""

    def __init__(self) -> None:
        self.made: set[str] = set()

    def find_spec(self, name: str, path: object, target: object = None) -> importlib.machinery.ModuleSpec | None:
        top, frame = name.split(".")[0], sys._getframe(1)
        while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("importlib"):
            frame = frame.f_back
        asking = frame.f_globals.get("__name__", "").split(".")[0]
        if top == "sglang" or (asking != "sglang" and asking not in self.made):
            return None
        self.made.add(top)
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


for _name in dir(import_utils):  # which remember what is there: before there is more
    if _name.startswith("is_") and _name.endswith("_available"):
        try:
            getattr(import_utils, _name)()
        except Exception:  # some need arguments
            continue
_register = transformers.AutoConfig.register  # SGLang registers models that newer releases have too
transformers.AutoConfig.register = lambda *args, exist_ok=False: _register(*args, exist_ok=True)
sys.meta_path.append(_MakesUp())
