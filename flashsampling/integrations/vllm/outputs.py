"""What a step of several ranks hands to vLLM: tokens that are waited for, and then whether the ranks agreed on them."""

from typing import Any

from ...tensor_parallel import TensorParallel


def checked(output: type) -> type:
    """A kind of vLLM's ``AsyncModelRunnerOutput``, around another one and a group. Rows of a step that failed have tokens all
    the same, and vLLM would hear of it at the next step, which need not come. ``get_output``, in whichever thread, has waited
    for the step, so its failure is known by then."""

    class Checked(output):  # type: ignore[misc]
        def __init__(self, theirs: Any, tp: TensorParallel) -> None:
            self.theirs, self.tp = theirs, tp

        def get_output(self) -> Any:
            """As theirs. Raises TensorParallelError if a step failed by now."""
            found = self.theirs.get_output()
            self.tp.raise_if_failed()
            return found

        def get_kv_connector_output(self) -> Any:
            """As theirs: newer releases ask for it where ``get_output`` raised."""
            return self.theirs.get_kv_connector_output()

    return Checked
