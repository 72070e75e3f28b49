"""``TokenCounts``: which tokens a request has seen and how often, on the device."""

import importlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .row_params import integer, row_index

IN_PROMPT = -(2**31)  # bit 31; the other bits count the output
_GROUP = 16  # tokens that share an element of ``Counted.seen``


class Counted(NamedTuple):
    """The counts that a step reads. As ``token_counts`` of ``sample`` it does not count the drawn tokens."""

    counts: Tensor  # (B, V) int32
    seen: Tensor | None  # (B, 8 ceil(V / 128)) uint8: ``SamplingParams.seen``


class CountedSlots(NamedTuple):
    """The counts that a step of ``RequestPool`` reads: those of some rows of a larger matrix."""

    counts: Tensor  # (S, V) int32
    seen: Tensor | None  # (S, 8 ceil(V / 128)) uint8
    rows: Tensor  # (B,) int64: each row's row of both, in range


def num_token_groups(vocab_size: int) -> int:
    """Returns the columns of ``Counted.seen``."""
    return 8 * -(-vocab_size // (8 * _GROUP))


def _make_seen(counts: Tensor) -> Tensor:
    """Returns ``Counted.seen`` of counts (rows, V)."""
    groups = num_token_groups(counts.shape[1])
    some = torch.nn.functional.pad(counts != 0, (0, groups * _GROUP - counts.shape[1]))
    return some.view(-1, groups, _GROUP).any(2).to(torch.uint8)


class TokenCounts:
    """Counts, for every row, how often each token occurs in its output and which tokens its prompt has, for the
    penalties of ``flashsampling.sample``.

    ``sample(token_counts=state)`` reads rows 0 to B - 1 and counts the tokens that it draws. Nothing waits for the
    device and nothing is allocated per step: a CUDA graph can capture such a step, and every replay counts on.

    A text has few of a vocabulary's tokens, so the object also keeps which groups of 16 tokens have a count; the Hopper
    kernel reads no other counts. Once ``counts`` was read as an attribute, other code may write to it: steps then read
    all counts, which takes longer, until ``recount``. Call ``recount`` after any later write, and before a CUDA graph
    replays that was captured before a write.

    Args:
        max_batch_size: number of rows.
        vocab_size: number of tokens. A row takes 4 bytes per token, and one byte per 16 tokens.
        device: None is torch's default.

    Attributes:
        counts: (max_batch_size, vocab_size) int32. The low 31 bits count occurrences in the output; bit 31: the prompt
            has the token.

    Raises:
        ValueError: a size is below 1.

    Example:
        >>> import torch, flashsampling
        >>> state = flashsampling.TokenCounts(max_batch_size=2, vocab_size=1000)
        >>> state.reset(rows=[0, 1], prompt_token_ids=[[5, 7, 7], [9]])
        >>> hidden_states, weight = torch.ones(2, 8), torch.zeros(1000, 8)
        >>> weight[5], weight[6] = 0.5, 0.4  # rows: logits 4.0 and 3.2, all others 0
        >>> flashsampling.sample(
        ...     hidden_states, weight, temperature=0.0, repetition_penalty=1.5, token_counts=state
        ... ).token_ids  # 5 is in the prompt of row 0: 4.0 / 1.5 is below 3.2
        tensor([6, 5])
        >>> state.counts[:, 5:8] & 0x7FFFFFFF
        tensor([[0, 1, 0],
                [1, 0, 0]], dtype=torch.int32)
    """

    def __init__(self, max_batch_size: int, vocab_size: int, device: torch.device | str | None = None) -> None:
        sizes = []
        for name, given in (("max_batch_size", max_batch_size), ("vocab_size", vocab_size)):
            sizes.append(size := integer(name, given))
            if size < 1:
                raise ValueError(f"{name} must be at least 1, got {size}")
        with torch.inference_mode(False):  # an inference tensor could not be written outside
            self._counts = torch.zeros(sizes, dtype=torch.int32, device=device)
            self._seen = torch.zeros((sizes[0], num_token_groups(sizes[1])), dtype=torch.uint8, device=device)
        self._is_shared = False  # other code may have written to the counts

    @property
    def counts(self) -> Tensor:
        """(max_batch_size, vocab_size) int32."""
        self._is_shared = True
        return self._counts

    @property
    def max_batch_size(self) -> int:
        """Number of rows."""
        return self._counts.shape[0]

    @property
    def vocab_size(self) -> int:
        """Number of tokens."""
        return self._counts.shape[1]

    def reset(self, rows: Tensor | slice | int | list[int] | None = None, prompt_token_ids: Any = None) -> None:
        """Starts new requests, in place.

        Args:
            rows: which rows, as an index; None is all.
            prompt_token_ids: ids for one row; for several, one list per row, or a tensor (rows, n) with -1 after a
                prompt's end. Ids out of range are ignored. None: no prompt, or one that the repetition penalty ignores.

        Raises:
            TypeError, ValueError: an argument does not fit; no row has changed then.
        """
        index = row_index(rows, self.max_batch_size)
        fresh = torch.zeros_like(self._counts[index])
        if prompt_token_ids is not None:
            ids = self._matrix(prompt_token_ids, len(fresh))
            there = (ids >= 0) & (ids < self.vocab_size)
            bits = torch.where(there, IN_PROMPT, 0).to(torch.int32)
            fresh.scatter_reduce_(1, torch.where(there, ids, 0), bits, "amin")
        self._counts[index] = fresh
        # not of ``fresh``: a row that is named twice has one of its values
        self._seen[index] = _make_seen(self._counts[index])

    def add(self, token_ids: Tensor, rows: Tensor | slice | int | list[int] | None = None) -> None:
        """Counts tokens of the output. -1 and other ids out of range are ignored.

        Args:
            token_ids: integers, one per row, or (rows, n).
            rows: the rows, as an index; None: from row 0 on, as many as there are in ``token_ids``.

        Raises:
            TypeError, ValueError: an argument does not fit.
        """
        if not isinstance(token_ids, Tensor) or token_ids.is_floating_point() or token_ids.dtype is torch.bool:
            got = token_ids.dtype if isinstance(token_ids, Tensor) else type(token_ids).__name__
            raise TypeError(f"token_ids must be a tensor of integers, got {got}")
        ids = token_ids[:, None] if token_ids.ndim == 1 else token_ids
        if ids.ndim != 2 or len(ids) > self.max_batch_size:
            raise ValueError(
                f"token_ids must have shape (B,) or (B, n), B up to max_batch_size = {self.max_batch_size}, "
                f"got shape {tuple(token_ids.shape)}"
            )
        chosen = None
        if rows is not None:
            chosen = torch.arange(self.max_batch_size, device=self._counts.device)[row_index(rows, self.max_batch_size)]
            if len(chosen) != len(ids):
                raise ValueError(
                    f"token_ids must have a row for each of {len(chosen)} rows, got shape {tuple(token_ids.shape)}"
                )
        self.add_to_rows(ids, chosen)

    def add_to_rows(self, ids: Tensor, chosen: Tensor | None) -> None:
        """Counts tokens (B, n) of rows (B,) int64, all in range; None: the first B."""
        from .backends import runs_small_kernels  # imports this module

        if runs_small_kernels(self._counts) and type(ids) is Tensor and ids.device == self._counts.device:
            # not by an import statement: the fingerprint of the Hopper kernels' cache would include Triton's sources
            token_counts = importlib.import_module(".kernels.triton.token_counts", __package__)
            with torch.cuda.device_of(self._counts):
                token_counts.count(self._counts, self._seen, ids, chosen, _GROUP)
            return
        ids = ids.long()
        there = (ids >= 0) & (ids < self.vocab_size)
        ids, ones = torch.where(there, ids, 0), there.to(torch.int32)
        if chosen is None:
            self._counts[: len(ids)].scatter_add_(1, ids, ones)
            self._seen[: len(ids)].scatter_(1, ids // _GROUP, 1)  # an id out of range marks group 0, which is harmless
        else:
            chosen = chosen[:, None].expand_as(ids)
            self._counts.index_put_((chosen, ids), ones, accumulate=True)
            self._seen[chosen, ids // _GROUP] = 1

    def read(self, batch_size: int) -> Counted:
        """Returns what a step of rows 0 to ``batch_size`` - 1 reads. ``sample`` takes it as ``token_counts`` and then
        does not count the drawn tokens."""
        return Counted(self._counts[:batch_size], None if self._is_shared else self._seen[:batch_size])

    def recount(self) -> None:
        """Notes which tokens have a count, after writes to ``counts``."""
        self._seen.copy_(_make_seen(self._counts))  # in place: CUDA graphs read this memory
        self._is_shared = False

    def apply(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Replaces the tensors by ``fn`` of them, such as a move to another device."""
        self._counts, self._seen = fn(self._counts), fn(self._seen)

    def _matrix(self, given: Any, count: int) -> Tensor:
        """Returns (count, n) int64 on the device, -1 after a row's end."""
        if not isinstance(given, Tensor):
            if hasattr(given, "tolist"):
                given = given.tolist()
            if not isinstance(given, Sequence):
                raise TypeError(
                    f"prompt_token_ids must be token ids, or a list of them per row, got {type(given).__name__}"
                )
            lists = [row.tolist() if hasattr(row, "tolist") else row for row in given]
            if not all(isinstance(row, (list, tuple)) for row in lists) or (not lists and count):
                lists = [lists]
            longest = max(map(len, lists), default=0)
            try:
                given = torch.tensor([[*row, *[-1] * (longest - len(row))] for row in lists], device="cpu")
                given = given.view(len(lists), longest)
            except (TypeError, ValueError, RuntimeError) as error:
                raise TypeError(f"prompt_token_ids must be token ids, or a list of them per row: {error}") from None
            given = given if given.numel() else given.long()  # torch takes [] for floats
        if given.is_floating_point() or given.dtype is torch.bool:
            raise TypeError(f"prompt_token_ids must be integers, got {given.dtype}")
        given = given[None] if given.ndim == 1 else given
        if given.ndim != 2 or len(given) != count:
            raise ValueError(
                f"prompt_token_ids must have one row for each of {count} rows, got shape {tuple(given.shape)}"
            )
        return given.to(self._counts.device, torch.int64)
