"""Sums of leaves have the bits of one tree, whoever adds what and in which order."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.step import Node, Tree


def by_hand(values: list[str]) -> str:
    """Return the sum written out: halves at the largest power of two."""
    if len(values) == 1:
        return values[0]
    half = 1 << (len(values) - 1).bit_length() - 1
    return f"({by_hand(values[:half])}+{by_hand(values[half:])})"


def written(left: str, right: str) -> str:
    return f"({left}+{right})"


@given(st.integers(1, 40), st.lists(st.integers(1, 39), max_size=5), st.randoms())
def test_who_adds_what_does_not_show(num_leaves: int, cuts: list[int], chance: random.Random):
    edges = sorted({0, num_leaves, *(c for c in cuts if c < num_leaves)})
    total: Tree[str] = Tree(num_leaves, written)
    received: list[tuple[Node, str]] = []
    for first, end in pairwise(edges):
        own: Tree[str] = Tree(num_leaves, written)
        leaves = list(range(first, end))
        chance.shuffle(leaves)
        for leaf in leaves:
            own.add(Node(0, leaf), str(leaf))
        ends = [(node.first, node.first + (1 << node.level)) for node in own.held]
        covered = [i for start, stop in ends for i in range(start, min(stop, num_leaves))]
        assert sorted(covered) == list(range(first, end))
        received += own.held.items()
    chance.shuffle(received)
    for node, value in received:
        total.add(node, value)
    assert total.total() == by_hand([str(i) for i in range(num_leaves)])


def test_a_process_sends_few_sums():
    tree: Tree[int] = Tree(64, lambda a, b: a + b)
    for leaf in range(1, 63):
        tree.add(Node(0, leaf), 1)
    assert len(tree.held) == 10  # two of each level that both ends are cut at


def test_threads_add_at_once():
    values = np.random.default_rng(0).normal(size=257).astype(np.float32)
    totals = set()
    for _ in range(20):
        tree: Tree[np.floating] = Tree(len(values), lambda a, b: a + b)
        with ThreadPoolExecutor(4) as pool:
            leaves = (Node(0, leaf) for leaf in range(len(values)))
            list(pool.map(tree.add, leaves, list(values)))
        totals.add(tree.total().tobytes())
    assert len(totals) == 1


def test_what_is_missing_or_twice_is_said():
    tree: Tree[int] = Tree(3, lambda a, b: a + b)
    tree.add(Node(0, 0), 1)
    with pytest.raises(ValueError, match="leaves are missing: the tree has 3"):
        tree.total()
    with pytest.raises(ValueError, match="node was added twice"):
        tree.add(Node(0, 0), 1)
    with pytest.raises(ValueError, match="num_leaves must be at least 1"):
        Tree(0, lambda a, b: a + b)
