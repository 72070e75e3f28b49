"""How the plug-in gets into vLLM: one method of its worker, after which the model runner is another class.

Plug-ins are called in all of vLLM's processes, also those that serve HTTP or look at a model's class, before most of vLLM is
imported. So ``register`` only waits for the module of the worker, which the processes that have a GPU import. A runner that is
refused is left as it was; of one that is not, ``__class__`` becomes a subclass, so that no other runner sees it.
"""

import functools
import importlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import importlib.util
import logging
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from .settings import VARIABLE, Refused, check_default, check_version, mode

_logger = logging.getLogger("vllm.flashsampling")  # below vLLM's own, which is the one that is shown there
_WORKER = "vllm.v1.worker.gpu_worker"


def register() -> None:
    """vLLM's entry point: has the worker of a known release fuse what it can.

    Called again, as vLLM may, it does nothing more.

    Raises:
        ValueError: ``FLASHSAMPLING_VLLM`` is none of "off", "auto" and "require".
        Refused: it is "require", and vLLM's release is not a known one.
        importlib.metadata.PackageNotFoundError: it is "require", and no distribution is called vllm.
    """
    chosen = mode()
    if chosen == "off":
        return
    try:
        version = importlib.metadata.version("vllm")
        check_default(check_version(version).on_gpus, f"the plug-in in vLLM {version}")
    except Exception as error:  # vLLM starts without the plug-in, whatever the plug-in did not expect
        if chosen == "require":
            raise
        _say(error)
        return
    when_imported(_WORKER, patch_worker)


def _say(error: Exception) -> None:
    is_refused = isinstance(error, Refused)
    _logger.warning("flashsampling: nothing is fused: %s", error if is_refused else repr(error), exc_info=not is_refused)


def counters(worker: Any) -> dict[str, Any]:
    """How many steps a worker fused, and how many it left to vLLM, by reason.

    ``LLM.collective_rpc`` takes it as it is: one dictionary per worker.

    Returns:
        "fused": steps; "left": steps that vLLM did; "split": steps of which vLLM did some rows; "drafts": how many were
        verified here; "reasons": how many of the steps had a request of each reason; "undefined_rows": rows without a finite
        score, which got token 0. "refused": why nothing is fused, if so. Reading them waits for the device.
    """
    runner = getattr(worker, "model_runner", None)
    fused = getattr(runner, "flashsampling", None)
    if fused is None:
        said = [getattr(each, "flashsampling_refused", None) for each in (worker, runner)]
        return {"refused": next(filter(None, said), "the plug-in is off, or was not loaded")}
    return fused.counters()  # type: ignore[no-any-return]


def patch_worker(module: ModuleType) -> None:
    """Has the worker's ``load_model`` attach the fused step behind it."""
    original = module.Worker.load_model
    if hasattr(original, "flashsampling"):
        return

    @functools.wraps(original)
    def load_model(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        attach(self)
        return result

    load_model.flashsampling = True  # type: ignore[attr-defined]
    module.Worker.load_model = load_model


def attach(worker: Any) -> None:
    """Fuses what a worker's runner can, or says why it does not, whatever the reason; raises it where that was required."""
    try:
        if not worker.use_v2_model_runner:
            raise Refused("vLLM chose its model runner v1 for this model and these settings; v2 is what is known")
        runner = importlib.import_module(".runner", __package__)
        said = runner.attach(worker.model_runner)
    except Refused as why:
        worker.flashsampling_refused = str(why)
        if mode() == "require":
            raise Refused(f"{why} ({VARIABLE}=require)") from None
        _say(why)
    except Exception as error:  # vLLM works without the plug-in, whatever the plug-in did not expect
        worker.flashsampling_refused = repr(error)
        if mode() == "require":
            raise
        _say(error)
    else:
        _logger.info("flashsampling: %s", said)


# -- once a module is there


def when_imported(name: str, then: Callable[[ModuleType], None]) -> None:
    """Calls ``then`` with a module: now if it is imported, else right after it is."""
    if name in sys.modules:
        then(sys.modules[name])
    elif not any(isinstance(finder, _Awaited) and finder.name == name for finder in sys.meta_path):
        sys.meta_path.insert(0, _Awaited(name, then))


class _Awaited(importlib.abc.MetaPathFinder):
    """Finds one module as the other finders do, until it is there, and has its loader call ``then`` behind it."""

    def __init__(self, name: str, then: Callable[[ModuleType], None]) -> None:
        self.name, self.then = name, then

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """As importlib has it. Who looks for a module need not import it, and a module that raises may be imported again."""
        if fullname != self.name or self not in sys.meta_path:
            return None
        sys.meta_path.remove(self)
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            sys.meta_path.insert(0, self)
        if spec is not None and spec.loader is not None:
            spec.loader = _Followed(spec.loader, self)
        return spec


class _Followed(importlib.abc.Loader):
    """A loader, and what follows it."""

    def __init__(self, loader: importlib.abc.Loader, awaited: _Awaited) -> None:
        self._loader, self._awaited = loader, awaited

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        """As importlib has it."""
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """As importlib has it."""
        self._loader.exec_module(module)
        assert module.__spec__ is not None
        module.__spec__.loader = self._loader
        if self._awaited in sys.meta_path:
            sys.meta_path.remove(self._awaited)
        self._awaited.then(module)
