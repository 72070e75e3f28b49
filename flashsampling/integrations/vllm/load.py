"""How the plug-in gets into vLLM: one method of its worker, after which the model runner is another class.

Plug-ins are called in all of vLLM's processes, also those that serve HTTP or look at a model's class, before most of vLLM is
imported. So ``register`` only waits for the module of the worker, which the processes that have a GPU import. A runner that is
refused is left as it was; of one that is not, ``__class__`` becomes a subclass, so that no other runner sees it.

Where the plug-in is required, vLLM's executor asks its workers, once they have loaded the model, whether each is fused: also a
worker of another class, or one that the environment did not reach.
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

from ..engine.plugin import Refused, switch
from .settings import GRAPHS, PLUGIN, TENSOR_PARALLEL, check_version

_WORKER = "vllm.v1.worker.gpu_worker"
_EXECUTOR = "vllm.v1.executor.abstract"


def register() -> None:
    """vLLM's entry point: where ``FLASHSAMPLING_VLLM`` asks for it, has the worker of a known release fuse what it can.

    Called again, as vLLM may, it does nothing more.

    Raises:
        Refused: ``FLASHSAMPLING_VLLM`` is "require", and this vLLM is not a known one, or another variable has a bad value.
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
    """How many steps a worker fused, and how many it left to vLLM, by reason.

    ``LLM.collective_rpc`` takes it as it is: one dictionary per worker.

    Returns:
        "fused": steps; "left": steps that vLLM did; "split": steps of which vLLM did some rows; "drafts": how many were
        verified here; "reasons": how many of the steps had a request of each reason; "undefined_rows": rows without a finite
        score, which got token 0. "refused": why nothing is fused, if so. Reading them waits for the device.
    """
    refused = refusal(worker)
    return worker.model_runner.flashsampling.counters() if refused is None else {"refused": refused}


def refusal(worker: Any) -> str | None:
    """Why a worker fuses nothing; None: it does."""
    runner = getattr(worker, "model_runner", None)
    if getattr(runner, "flashsampling", None) is not None:
        return None
    said = [getattr(each, "flashsampling_refused", None) for each in (worker, runner)]
    return next(filter(None, said), "the plug-in is off, or was not loaded")


def patch_worker(module: ModuleType) -> None:
    """Has the worker's ``load_model`` attach the fused step behind it."""
    _follow(module, "Worker", "load_model", attach)


def patch_executor(module: ModuleType) -> None:
    """Has an executor check its workers once they have loaded the model."""
    _follow(module, "Executor", "__init__", check_workers)


def _follow(module: ModuleType, owner: str, name: str, then: Callable[[Any], None]) -> None:
    """Calls ``then`` with an object of a module's class behind one of its methods."""
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
    """Fuses what a worker's runner can, or says why it does not, whatever the reason; raises it where that was required."""
    try:
        if not worker.use_v2_model_runner:
            raise Refused("vLLM chose its model runner v1 for this model and these settings; v2 is what is known")
        said = importlib.import_module(".runner", __package__).attach(worker.model_runner)
    except BaseException as error:
        PLUGIN.leave(error, worker)
    else:
        PLUGIN.logger.info("flashsampling: %s", said)


def check_workers(executor: Any) -> None:
    """Raises Refused if a worker of an executor fuses nothing."""
    if getattr(executor, "rpc_broadcast_mq", executor) is None:  # another node's executor asks this one's workers
        return
    refused = {rank: words for rank, words in enumerate(executor.collective_rpc(refusal)) if words is not None}
    if refused:
        PLUGIN.leave(Refused(f"of {len(refused)} workers: {refused}"))


# -- once a module is there


def when_imported(name: str, then: Callable[[ModuleType], None]) -> None:
    """Calls ``then`` with a module: now if it is imported, else right after it is."""
    if name in sys.modules:
        then(sys.modules[name])
    elif not any(isinstance(finder, _Awaited) and finder.name == name for finder in sys.meta_path):
        sys.meta_path.insert(0, _Awaited(name, then))


class _Awaited:
    """Finds one module as the other finders do, until it is there, and has its loader call ``then`` behind it."""

    def __init__(self, name: str, then: Callable[[ModuleType], None]) -> None:
        self.name, self.then = name, then

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """As the other finders. Who looks for a module need not import it, and a module that raises may be imported again."""
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
    """A module's loader, and what follows it."""

    def __init__(self, spec: Any, awaited: _Awaited) -> None:
        self._spec, self._loader, self._awaited = spec, spec.loader, awaited

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def exec_module(self, module: ModuleType) -> None:
        """As the module's own loader, which the module has again."""
        self._spec.loader = self._loader
        with contextlib.suppress(AttributeError):
            module.__loader__ = self._loader
        self._loader.exec_module(module)
        with contextlib.suppress(ValueError):
            sys.meta_path.remove(self._awaited)  # type: ignore[arg-type]
        self._awaited.then(module)
