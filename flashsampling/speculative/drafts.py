"""Drafts of several requests: where their rows are, and which of them are accepted once the target's tokens are known.

A request has up to n drafts and one more row of hidden states: node 0 is the position after its last token, node j + 1
the position after its draft j. In a chain node j + 1 follows node j; in a tree it follows the node that ``parents``
names. All functions are torch on the device: nothing waits, and no index is out of range, whatever the tensors hold.
"""

from itertools import pairwise
from typing import Any, NamedTuple, SupportsIndex

import torch
from torch import Tensor

from ..exchange_protocol import NO_TOKEN
from ..row_params import Integers, check_plain, integer, is_symbolic

# added to a request's number: for its number of drafts, and for the most drafts
HASH_OF_ROOM, HASH_OF_MOST = 1 << 61, 1 << 62
HASH_FACTORS = 0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9, 0x14D049BB133111EB  # odd


class Tree(NamedTuple):
    """The parents of draft trees."""

    parents: Tensor  # (B, n + 1) int64: each node's parent; the root's is the root
    depth: Tensor  # (B, n + 1) int64: number of drafts on the path to a node; at most n
    sound: Tensor  # (B, n) bool: the draft's parent precedes it


class Nodes(NamedTuple):
    """A subset of the rows of hidden states."""

    row: Tensor  # (k,) int64, among all rows
    request: Tensor  # (k,) int64, from 0 to B - 1
    node: Tensor  # (k,) int64, from 0 to n
    depth: Tensor  # (k,) int64: number of tokens that the request draws before this one


class Accepted(NamedTuple):
    """The accepted drafts."""

    num_accepted: Tensor  # (B,) int64
    nodes: Tensor  # (B, n + 1) int64: the node of the accepted path at each depth; -1 after its end


class Drafts(NamedTuple):
    """Drafts of B requests, up to n of each; N in total, one request after the other."""

    token_ids: Tensor  # (B, n) int64; -1: no draft; a chain ends there
    rows: Tensor  # (B, n + 1) int64: each node's row of hidden states
    request: Tensor  # (R,) int64: each row's
    node: Tensor  # (R,) int64: each row's
    tree: Tree | None  # None: chains
    bounds: Tensor | None  # (B + 1,) int64: where each request's drafts begin among N, and the end; None: B times n

    def nodes(self) -> Nodes:
        """Returns all rows."""
        everywhere = torch.arange(self.request.shape[0], device=self.request.device)
        depth = self.node
        if self.tree is not None:
            depth = self.tree.depth.flatten()[self.request * self.rows.shape[1] + self.node]
        return Nodes(everywhere, self.request, self.node, depth)

    def places(self) -> Tensor:
        """Returns (B, n) int64: each draft's index among N; any valid index where there is no draft."""
        batch = self.rows.shape[0]
        requests = torch.arange(batch, device=self.rows.device)[:, None]  # each has one more row than drafts
        return (self.rows[:, :-1] - requests).clamp(0, max(self.request.shape[0] - batch - 1, 0))

    def predecessors(self) -> Nodes:
        """Returns (B * n,) nodes of chains: the node before each draft."""
        (batch, n), device = self.token_ids.shape, self.rows.device
        request = torch.arange(batch, device=device)[:, None].expand(-1, n).flatten()
        node = torch.arange(n, device=device).expand(batch, -1).flatten()
        return Nodes(self.rows[:, :-1].flatten(), request, node, node)

    def ends(self, node: Tensor) -> Nodes:
        """Returns one node, (B,), of every request's chain."""
        request = torch.arange(node.shape[0], device=node.device)
        return Nodes(self.rows.gather(1, node[:, None])[:, 0], request, node, node)

    def hash(self) -> Tensor:
        """Returns () int64: a hash of the numbers of drafts, of the drafts and, for trees, of their parents. Other
        drafts have another hash, except with a probability of about 2**-32 at worst. Ids beyond those of tokens count
        as one id, because none of them is ever accepted. ``kernels/triton/speculative/draft_chains`` computes the
        same."""
        (batch, n), device = self.token_ids.shape, self.token_ids.device
        requests = torch.arange(batch, device=device)[:, None] << 32
        places = requests | torch.arange(n, device=device)
        hashed = (self.token_ids.clamp(max=NO_TOKEN) + 1) * _odd_number(places)  # 0 where there is none
        room = n if self.bounds is None else self.bounds[1:, None] - self.bounds[:-1, None]
        of_shape = room * _odd_number(requests | HASH_OF_ROOM) + (n + 1) * _odd_number(requests | HASH_OF_MOST)
        if self.tree is not None:
            after = torch.where(self.tree.sound, self.tree.parents[:, 1:] + 1, 0)
            hashed = hashed + torch.where(self.token_ids >= 0, after, 0) * _odd_number(~places)
        return hashed.sum() + of_shape.sum()

    def before(self, nodes: Nodes) -> Tensor:
        """Returns (k, n) bool: the drafts before a node's position."""
        n = self.token_ids.shape[1]
        if self.tree is None:
            return torch.arange(n, device=nodes.node.device) < nodes.node[:, None]
        parents = self.tree.parents
        on_path = torch.eye(n + 1, dtype=torch.bool, device=parents.device).expand(parents.shape[0], -1, -1)
        for _ in _doublings(n):
            on_path = on_path | on_path.gather(1, parents[:, :, None].expand_as(on_path))
            parents = parents.gather(1, parents)
        return on_path.flatten(0, 1)[nodes.request * (n + 1) + nodes.node, 1:]

    def counted(self, rows: Tensor, nodes: Nodes, vocab_size: int) -> Tensor:
        """Adds the drafts before a node's position to ``rows`` (k, V) int32, in place, and returns them."""
        ids = self.token_ids.index_select(0, nodes.request)
        there = self.before(nodes) & (ids >= 0) & (ids < vocab_size)
        return rows.scatter_add_(1, torch.where(there, ids, 0), there.to(torch.int32))

    def matched(self, tokens: Tensor) -> Accepted:
        """Accepts drafts while they equal what the target drew, ``tokens`` (B, n + 1) after each node."""
        if self.tree is None:
            return self.up_to((tokens[:, :-1] == self.token_ids) & (self.token_ids >= 0))
        parents, depth, sound = self.tree
        ids, before = self.token_ids, parents[:, 1:]
        equal = (ids[:, :, None] == ids[:, None, :]) & (before[:, :, None] == before[:, None, :]) & sound[:, None, :]
        again = equal.tril(-1).any(dim=-1)  # an earlier sibling has the same token
        holds = (tokens.gather(1, before) == ids) & (ids >= 0) & sound & ~again
        on_path = torch.nn.functional.pad(holds, (1, 0), value=True)  # the root is
        for _ in _doublings(ids.shape[1]):  # doubles the distance in every round
            on_path = on_path & on_path.gather(1, parents)
            parents = parents.gather(1, parents)
        numbers = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        nodes = tokens.new_full((tokens.shape[0], tokens.shape[1] + 1), -1)  # the last column takes nodes off the path
        nodes.scatter_(1, torch.where(on_path, depth, tokens.shape[1]), numbers)
        nodes = nodes[:, :-1]
        return Accepted(on_path.sum(dim=1) - 1, nodes)

    def up_to(self, holds: Tensor) -> Accepted:
        """Accepts drafts of chains up to the first that does not hold. ``holds``: (B, n) bool."""
        return self.first(holds.cumprod(dim=1).sum(dim=1))

    def first(self, num_accepted: Tensor) -> Accepted:
        """Accepts the first ``num_accepted`` (B,) drafts of every chain."""
        numbers = torch.arange(self.rows.shape[1], device=num_accepted.device)
        return Accepted(num_accepted, torch.where(numbers <= num_accepted[:, None], numbers, -1))


class DraftBatch(NamedTuple):
    """Drafts as the caller passed them, checked. ``drafts`` computes the index of every row in a dozen operations on
    the device."""

    token_ids: Tensor  # (B, n) int64, or (N,) with bounds
    parents: Tensor | None  # same shape; None: chains
    bounds: Tensor | None  # (B + 1,) int64, B above 0; None: a rectangle
    batch: int
    n: int

    @property
    def positions(self) -> int:
        """Number of rows of hidden states."""
        return self.token_ids.numel() + self.batch

    def drafts(self) -> Drafts:
        """Returns the drafts with the index of every row."""
        if self.bounds is None:
            return _padded(self.token_ids, self.parents)
        return _ragged(self.token_ids, self.parents, self.bounds, self.n)


def _padded(
    token_ids: Tensor,  # (B, n) int64
    parents: Tensor | None,  # (B, n) int64
) -> Drafts:
    """Returns the drafts of a rectangle, with B * (n + 1) rows of hidden states."""
    batch, n = token_ids.shape
    rows = torch.arange(batch * (n + 1), device=token_ids.device)
    request, node = rows // (n + 1), rows % (n + 1)
    return Drafts(_present(token_ids, parents), rows.view(batch, n + 1), request, node, _tree(parents), None)


def _ragged(
    token_ids: Tensor,  # (N,) int64
    parents: Tensor | None,  # (N,) int64
    bounds: Tensor,  # (B + 1,) int64, B above 0
    n: int,
) -> Drafts:
    """Returns the drafts of a ragged batch, with N + B rows of hidden states. A request's drafts after its n-th are
    ignored."""
    batch, total, device = bounds.shape[0] - 1, token_ids.shape[0], token_ids.device
    there = torch.arange(n, device=device) < (bounds[1:] - bounds[:-1])[:, None]
    places = (bounds[:-1, None] + torch.arange(n, device=device)).clamp(0, max(total - 1, 0))

    def rectangle(values: Tensor) -> Tensor:
        return torch.where(there, values[places], -1) if total else torch.full_like(places, -1)

    firsts = bounds + torch.arange(batch + 1, device=device)  # a request has one more row than drafts
    rows = (firsts[:-1, None] + torch.arange(n + 1, device=device)).clamp(0, total + batch - 1)
    every_row = torch.arange(total + batch, device=device)
    request = (torch.searchsorted(firsts, every_row, right=True) - 1).clamp(0, batch - 1)
    node = (every_row - firsts[request]).clamp(0, n)
    tree = None if parents is None else _tree(rectangle(parents))
    return Drafts(_present(rectangle(token_ids), parents), rows, request, node, tree, bounds)


def _present(token_ids: Tensor, parents: Tensor | None) -> Tensor:
    """Returns the ids with -1 where there is no draft: a negative id in a tree, all from the first one on in a
    chain."""
    there = token_ids >= 0
    return torch.where(there if parents is not None else there.cumprod(dim=1).bool(), token_ids, -1)


def _doublings(n: int) -> range:
    """Returns how often pointers are doubled until each of n drafts points to the root. Doubling more often changes
    nothing, so a compiler that does not know n makes one graph for up to 63 drafts, and one for more."""
    if is_symbolic(n):
        return range(6 if n < 64 else NO_TOKEN.bit_length())
    return range(n.bit_length())


def _tree(parents: Tensor | None) -> Tree | None:
    """Returns the trees of ``parents`` (B, n), each a draft's index, or -1 for the root."""
    if parents is None:
        return None
    n = parents.shape[1]
    sound = (parents >= -1) & (parents < torch.arange(n, device=parents.device))
    before = torch.where(sound, parents + 1, 0)
    nodes = torch.nn.functional.pad(before, (1, 0))
    depth = torch.nn.functional.pad(torch.ones_like(before), (1, 0))
    above = nodes
    for _ in _doublings(n):  # doubles the distance in every round
        depth = depth + depth.gather(1, above)
        above = above.gather(1, above)
    return Tree(nodes, depth, sound)


def _odd_number(place: Tensor) -> Tensor:
    """Returns odd int64 that look random, of int64. Sums of different multiples of them are hardly ever equal. That
    needs numbers that are not as far apart as the places are, hence SplitMix64's shifts; a place of 0 must not give
    0."""
    number = place * HASH_FACTORS[0] + HASH_FACTORS[2]
    number = (number ^ number >> 30) * HASH_FACTORS[1]
    number = (number ^ number >> 27) * HASH_FACTORS[2]
    return number ^ number >> 31 | 1


# -- arguments


def layout(
    name: str,
    states: Tensor,
    draft_token_ids: Any,
    cu_draft_lengths: Integers | None,
    max_draft_length: SupportsIndex | None,
    parents: Any,
) -> tuple[DraftBatch, Tensor]:
    """Returns the drafts, and the states of all positions as rows. Raises what ``verify`` documents."""
    ids = _integers("draft_token_ids", draft_token_ids, states.device)
    if parents is not None:
        parents = _integers("parents", parents, states.device)
        if parents.shape != ids.shape:
            raise ValueError(
                f"parents must have the shape of draft_token_ids, {tuple(ids.shape)}, got {tuple(parents.shape)}"
            )
    if cu_draft_lengths is None:
        if max_draft_length is not None:
            raise ValueError(
                "max_draft_length must be None without cu_draft_lengths: the columns of draft_token_ids say it"
            )
        if ids.ndim != 2:
            hint = "(B, n), or (N,) with cu_draft_lengths"
            raise ValueError(f"draft_token_ids must have shape {hint}, got shape {tuple(ids.shape)}")
        batch, n = ids.shape
        if states.ndim != 3 or states.shape[:2] != (batch, n + 1):
            wanted = f"({batch}, {n + 1}, ...), one more than drafts"
            raise ValueError(f"{name} must have shape {wanted}, got shape {tuple(states.shape)}")
        return DraftBatch(ids, parents, None, batch, n), states.reshape(batch * (n + 1), states.shape[2])
    if ids.ndim != 1:
        raise ValueError(f"draft_token_ids must have shape (N,) with cu_draft_lengths, got shape {tuple(ids.shape)}")
    bounds, most = _check_bounds(cu_draft_lengths, ids.shape[0], states.device)
    if max_draft_length is not None:
        most = integer("max_draft_length", max_draft_length)
        if not 0 <= most <= NO_TOKEN:
            raise ValueError(f"max_draft_length must be from 0 to 2**31 - 1, got {most}")
    if most is None:
        raise ValueError(
            "max_draft_length must be given with a tensor of cu_draft_lengths, which the host does not read"
        )
    batch = bounds.shape[0] - 1
    if states.ndim != 2 or states.shape[0] != ids.shape[0] + batch:
        wanted = f"({ids.shape[0] + batch}, ...), a row for each of {ids.shape[0]} drafts and {batch} requests"
        raise ValueError(f"{name} must have shape {wanted}, got shape {tuple(states.shape)}")
    if batch == 0:
        empty = ids.new_empty(0, most)
        return DraftBatch(empty, None if parents is None else empty, None, 0, most), states[:0]
    return DraftBatch(ids, parents, bounds, batch, most), states


def _check_bounds(cu_draft_lengths: Integers, total: int, device: torch.device) -> tuple[Tensor, int | None]:
    """Returns (B + 1,) on the device, and the most drafts of a request if the host knows it."""
    name = "cu_draft_lengths"
    if isinstance(cu_draft_lengths, Tensor):
        bounds = _integers(name, cu_draft_lengths, device)
        if bounds.ndim != 1 or bounds.shape[0] < 1:
            raise ValueError(f"{name} must have shape (B + 1,), got shape {tuple(bounds.shape)}")
        return bounds, None
    given = getattr(cu_draft_lengths, "tolist", lambda: cu_draft_lengths)()
    if not isinstance(given, (list, tuple)) or not given:
        raise TypeError(f"{name} must be B + 1 integers, got {type(cu_draft_lengths).__name__}")
    numbers = [integer(name, number) for number in given]
    lengths = [after - before for before, after in pairwise(numbers)]
    if numbers[0] != 0 or numbers[-1] > total or min(lengths, default=0) < 0:
        raise ValueError(f"{name} must go up from 0 to the {total} of draft_token_ids at most, got {numbers}")
    return torch.tensor(numbers, device=device), max(lengths, default=0)


def _integers(name: str, value: Any, device: torch.device) -> Tensor:
    """Returns a contiguous int64 tensor."""
    check_plain(name, value, device)
    if value.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name} must be int32 or int64, got {value.dtype}")
    return value.long().contiguous()
