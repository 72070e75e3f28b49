"""Errors while tokens are drawn."""


class NoTokenError(RuntimeError):
    """A sequence has no next token: its scores hold a NaN or no finite value, or no token is allowed.

    Raised before the step's ids are used.

    Attributes:
        rows: indices of the sequences in the batch.
    """

    def __init__(self, rows: list[int], position: int) -> None:
        super().__init__(
            f"no token for rows {rows} of the batch at new token {position}: a NaN in their logits, or none finite "
            "that is not masked out"
        )
        self.rows = rows
