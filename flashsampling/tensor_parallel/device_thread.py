"""Calls to a device that may never return, with a bound."""

import threading
from collections.abc import Callable
from contextlib import nullcontext

import torch


class DeviceThread:
    """Runs a call that may never return in a thread of its own, with ``device`` as the current device."""

    def __init__(self, call: Callable[[], None], device: torch.device) -> None:
        self.error: Exception | None = None  # of the call

        def work() -> None:
            try:
                with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
                    call()
            except Exception as error:
                self.error = error

        self._thread = threading.Thread(target=work, name="flashsampling device", daemon=True)
        self._thread.start()

    def ends_within(self, seconds: float) -> bool:
        """Waits for at most ``seconds``. Returns whether the call has returned."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def result(self) -> None:
        """Raises the exception of the call, if there was one."""
        if self.error is not None:
            raise self.error
