"""Attaches the plug-in to vLLM: once a worker has loaded its model, its model runner has another class.

vLLM calls plug-ins in all of its processes, also those that serve HTTP or inspect a model's class. ``register``
therefore patches what all of them import, the wrapper around each worker. A refused runner stays as it was. The
``__class__`` of another one becomes a subclass, so that no other runner changes.

Where the plug-in is required, vLLM's executor asks its workers whether each is fused, once they have loaded the model.
That covers a worker that the environment did not reach.
"""

import functools
import importlib
import importlib.metadata
from typing import Any

from ..engine.plugin import Refused, read_counters, refusal, switch
from .settings import GRAPHS, PLUGIN, TENSOR_PARALLEL, check_version

_WORKER = "vllm.v1.worker.worker_base"
_EXECUTOR = "vllm.v1.executor.abstract"


def register() -> None:
    """Is vLLM's entry point: where ``FLASHSAMPLING_VLLM`` says so, makes the worker of a known release fuse what it
    can.

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
            patch_executor(importlib.import_module(_EXECUTOR).Executor)
        patch_wrapper(importlib.import_module(_WORKER).WorkerWrapperBase)
    except BaseException as error:
        PLUGIN.leave(error)


def counters(worker: Any) -> dict[str, Any]:
    """Counts the steps that a worker fused, and those that it left to vLLM, by reason.

    ``LLM.collective_rpc`` takes this function as it is: one dictionary per worker.

    Returns:
        "fused": steps; "left": steps that vLLM did; "split": steps of which some rows were drawn here after vLLM had
        drawn all; "drafts": how many were verified here; "reasons": how many of the steps had a request of each reason;
        "undefined_rows": rows without a finite score, which got token 0. "refused": why nothing is fused, if so.
        Reading them waits for the device.
    """
    return read_counters(getattr(worker, "model_runner", None), worker)


def worker_refusal(worker: Any) -> str | None:
    """Returns why a worker fuses nothing; None if it fuses."""
    return refusal(getattr(worker, "model_runner", None), worker)


def patch_wrapper(kind: type) -> None:
    """Makes vLLM's wrapper around a worker attach the fused step when the worker has loaded its model."""

    def load_model(self: Any, *args: Any, **kwargs: Any) -> None:
        self.worker.load_model(*args, **kwargs)
        attach(self.worker)

    kind.load_model = load_model  # type: ignore[attr-defined] # until now found on the worker


def patch_executor(kind: type) -> None:
    """Makes an executor check its workers once they have loaded the model."""
    init = kind.__init__  # type: ignore[misc]

    @functools.wraps(init)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        check_workers(self)

    kind.__init__ = __init__  # type: ignore[misc]


def attach(worker: Any) -> None:
    """Fuses what a worker's runner can, or logs why it does not, whatever the reason; raises it where the plug-in is
    required."""
    try:
        if not getattr(worker, "use_v2_model_runner", False):
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
    refused = {rank: words for rank, words in enumerate(executor.collective_rpc(worker_refusal)) if words is not None}
    if refused:
        PLUGIN.leave(Refused(f"of {len(refused)} workers: {refused}"))
