r"""Sums over the leaves of a step, added in one fixed order whoever holds which.

Floating-point sums depend on their order. Here the order is a binary tree over
the leaves 0 to num_leaves - 1: node (level, number) covers the leaves from
number * 2**level, 2**level of them, and is the sum of its two children. What lies
beyond the last leaf is left out. A process that has some leaves adds up every
node whose leaves it has; the nodes that are left, `held`, are what it sends, and
whoever has received all of them finishes the same tree with the same bits.

    level 2         (2,0)
                   /     \
    level 1     (1,0)   (1,1)
                 / \     / \
    leaves      0   1   2   3      one process has 0 1 2: it sends (1,0) and (0,2)
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")


class Node(NamedTuple):
    """A place in the tree."""

    level: int
    number: int

    @property
    def first(self) -> int:
        """The first leaf that it covers."""
        return self.number << self.level

    @property
    def sibling(self) -> Node:
        """The other child of its parent."""
        return Node(self.level, self.number ^ 1)

    @property
    def parent(self) -> Node:
        """The node that is the sum of it and its sibling."""
        return Node(self.level + 1, self.number >> 1)


class Tree(Generic[T]):
    """Sums what is added to it, pair by pair; several threads may add at once."""

    def __init__(self, num_leaves: int, add: Callable[[T, T], T]) -> None:
        """Begin with no leaf.

        Args:
            num_leaves: of the whole step.
            add: sum of a left and a right value.
        """
        if num_leaves < 1:
            raise ValueError(f"num_leaves must be at least 1, got {num_leaves}; add blocks")
        self._num_leaves = num_leaves
        self._add = add
        self._lock = threading.Lock()
        self._held: dict[Node, T] = {}

    @property
    def held(self) -> dict[Node, T]:
        """Return the largest nodes whose leaves are all here."""
        with self._lock:
            return dict(self._held)

    def add(self, node: Node, value: T) -> None:
        """Add a node, and every sum that it completes.

        Args:
            node: a leaf (0, i), or a sum that another process has made; never one twice.
            value: its value.
        """
        while not self._covers_all(node):
            other = node.sibling
            if other.first >= self._num_leaves:
                node = node.parent  # there is nothing to the right of it
                continue
            with self._lock:
                found = self._held.pop(other, None)
                if found is None:
                    self._keep(node, value)
                    return
            left, right = (value, found) if node.number < other.number else (found, value)
            value, node = self._add(left, right), node.parent
        with self._lock:
            self._keep(node, value)

    def total(self) -> T:
        """Return the sum of all leaves.

        Raises:
            ValueError: leaves are missing.
        """
        held = self.held
        for node, value in held.items():
            if self._covers_all(node):
                return value
        raise ValueError(
            f"all of {self._num_leaves} leaves must be added, got {sorted(held)}; add the others"
        )

    def _covers_all(self, node: Node) -> bool:
        return node.number == 0 and 1 << node.level >= self._num_leaves

    def _keep(self, node: Node, value: T) -> None:
        if node in self._held:
            raise ValueError(f"a node must be added once, got {tuple(node)} again; drop it")
        self._held[node] = value


def leaves_under(node: Node, num_leaves: int) -> range:
    """Return the leaves that a node covers.

    Args:
        node: of a tree.
        num_leaves: of that tree.

    Example:
        >>> leaves_under(Node(2, 1), 7)
        range(4, 7)
    """
    return range(node.first, min(node.first + (1 << node.level), num_leaves))
