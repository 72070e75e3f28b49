"""Attaches the plug-in to vLLM: after one method of its worker the model runner has another class.

vLLM calls plug-ins in all of its processes, also those that serve HTTP or inspect a model's class, before most of vLLM
is imported. ``register`` therefore only waits for the module of the worker, which the processes with a GPU import. A
refused runner stays as it was. The ``__class__`` of another one becomes a subclass, so that no other runner changes.

Where the plug-in is required, vLLM's executor asks its workers whether each is fused, once they have loaded the model.
That covers a worker of another class, and a worker that the environment did not reach.
"""

import contextlib
import functools
import importlib
import importlib.machinery
import importlib.metadata
import importlib.util
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from ..engine.plugin import NOT_LOADED, Refused, switch
from .settings import GRAPHS, PLUGIN, TENSOR_PARALLEL, check_version

_WORKER = "vllm.v1.worker.gpu_worker"
_EXECUTOR = "vllm.v1.executor.abstract"


def register() -> None:
    """Is vLLM's entry point: where ``FLASHSAMPLING_VLLM`` says so, makes the worker of a known release fuse what it
    can.

    A second call does nothing.

    Raises:
        Refused: ``FLASHSAMPLING_VLLM`` is "require", and this vLLM is not a known one, or another variable has a bad
        value.
    """
    try:
        mode = PLUGIN.mode()
        if mode == "off":
            return
        for variable in (TENSOR_PARALLEL, GRAPHS):
            switch(variable)
        check_version(importlib.metadata.version("vllm"))
        if mode == "require":
            if importlib.util.find_spec(_WORKER) is None:
                raise Refused(f"there is no module {_WORKER} here: this release of vLLM is not known")
            when_imported(_EXECUTOR, patch_executor)
        when_imported(_WORKER, patch_worker)
    except BaseException as error:
        PLUGIN.leave(error)


def counters(worker: Any) -> dict[str, Any]:
    """Counts the steps that a worker fused, and those that it left to vLLM, by reason.

    ``LLM.collective_rpc`` takes this function as it is: one dictionary per worker.

    Returns:
        "fused": steps; "left": steps that vLLM did; "split": steps of which vLLM did some rows; "drafts": how many were
        verified here; "reasons": how many of the steps had a request of each reason; "undefined_rows": rows without a
        finite score, which got token 0. "refused": why nothing is fused, if so. Reading them waits for the device.
    """
    refused = refusal(worker)
    return worker.model_runner.flashsampling.counters() if refused is None else {"refused": refused}


def refusal(worker: Any) -> str | None:
    """Returns why a worker fuses nothing; None if it fuses."""
    runner = getattr(worker, "model_runner", None)
    if getattr(runner, "flashsampling", None) is not None:
        return None
    refused = [getattr(each, "flashsampling_refused", None) for each in (worker, runner)]
    return next(filter(None, refused), NOT_LOADED)


def patch_worker(module: ModuleType) -> None:
    """Makes the worker's ``load_model`` attach the fused step when it is done."""
    _follow(module, "Worker", "load_model", attach)


def patch_executor(module: ModuleType) -> None:
    """Makes an executor check its workers once they have loaded the model."""
    _follow(module, "Executor", "__init__", check_workers)


def _follow(module: ModuleType, owner: str, name: str, then: Callable[[Any], None]) -> None:
    """Calls ``then`` with an object of a module's class after one of its methods."""
    try:
        kind = getattr(module, owner, None)
        original = None if kind is None else getattr(kind, name, None)
        if original is None:
            raise Refused(f"there is no {owner}.{name} here: this release of vLLM is not known")
        if hasattr(original, "flashsampling"):
            return

        @functools.wraps(original)
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(self, *args, **kwargs)
            then(self)
            return result

        method.flashsampling = True  # type: ignore[attr-defined]
        setattr(kind, name, method)
    except BaseException as error:
        PLUGIN.leave(error)


def attach(worker: Any) -> None:
    """Fuses what a worker's runner can, or logs why it does not, whatever the reason; raises it where the plug-in is
    required."""
    try:
        if not worker.use_v2_model_runner:
            raise Refused("vLLM chose its model runner v1 for this model and these settings; v2 is what is known")
        summary = importlib.import_module(".runner", __package__).attach(worker.model_runner)
    except BaseException as error:
        PLUGIN.leave(error, worker)
    else:
        PLUGIN.logger.info("flashsampling: %s", summary)


def check_workers(executor: Any) -> None:
    """Raises Refused if a worker of an executor fuses nothing."""
    if getattr(executor, "rpc_broadcast_mq", executor) is None:  # another node's executor asks this one's workers
        return
    refused = {rank: words for rank, words in enumerate(executor.collective_rpc(refusal)) if words is not None}
    if refused:
        PLUGIN.leave(Refused(f"of {len(refused)} workers: {refused}"))


# -- once a module is imported


def when_imported(name: str, then: Callable[[ModuleType], None]) -> None:
    """Calls ``then`` with a module: now if it is imported, else right after it is."""
    if name in sys.modules:
        then(sys.modules[name])
    elif not any(isinstance(finder, _Awaited) and finder.name == name for finder in sys.meta_path):
        sys.meta_path.insert(0, _Awaited(name, then))


class _Awaited:
    """Finds one module as the other finders do, until it is imported, and makes its loader call ``then`` afterwards."""

    def __init__(self, name: str, then: Callable[[ModuleType], None]) -> None:
        self.name, self.then = name, then

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Returns the other finders' spec. A found module need not be imported, and a module that raises may be
        imported again."""
        if fullname != self.name:
            return None
        for finder in list(sys.meta_path):
            find = None if finder is self else getattr(finder, "find_spec", None)
            spec = None if find is None else find(fullname, path, target)
            if spec is not None:
                if hasattr(spec.loader, "exec_module"):
                    spec.loader = _Followed(spec, self)
                return spec  # type: ignore[no-any-return]
        return None


class _Followed:
    """A module's loader, which calls ``then`` afterwards."""

    def __init__(self, spec: Any, awaited: _Awaited) -> None:
        self._spec, self._loader, self._awaited = spec, spec.loader, awaited

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def exec_module(self, module: ModuleType) -> None:
        """Executes the module with its own loader, and gives that back to the module."""
        self._spec.loader = self._loader
        with contextlib.suppress(AttributeError):
            module.__loader__ = self._loader
        self._loader.exec_module(module)
        with contextlib.suppress(ValueError):
            sys.meta_path.remove(self._awaited)  # type: ignore[arg-type]
        self._awaited.then(module)
