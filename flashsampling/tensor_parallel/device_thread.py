"""What is asked of a device and may never end, with a bound."""

import threading
from collections.abc import Callable
from contextlib import nullcontext

import torch


class DeviceThread:
    """A call that may never end, in a thread of its own.

    Args:
        call: what is done, with ``device`` the current one.
        device: of the group.

    Attributes:
        error: what the call raised, if it did.
    """

    def __init__(self, call: Callable[[], None], device: torch.device) -> None:
        self.error: Exception | None = None

        def work() -> None:
            try:
                with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
                    call()
            except Exception as error:
                self.error = error

        self._thread = threading.Thread(target=work, name="flashsampling device", daemon=True)
        self._thread.start()

    def ends_within(self, seconds: float) -> bool:
        """Waits that long at most."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def result(self) -> None:
        """Raises what the call raised."""
        if self.error is not None:
            raise self.error
