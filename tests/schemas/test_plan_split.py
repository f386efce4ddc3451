"""Local and shared rows against a count of the lookups of each replica."""

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.arrays import Jagged, offsets_of
from schemas.cache_plan import BlockSplit, Plan, classify_rows
from schemas.config.train import CacheConfig
from schemas.oracle import next_use

BLOCKS = st.lists(st.sets(st.integers(0, 8), max_size=5), min_size=1, max_size=8)


def blocks_of(blocks: list[set[int]]) -> Jagged:
    flat = [number for block in blocks for number in sorted(block)]
    return Jagged(np.array(flat, np.int64), offsets_of(np.array([len(b) for b in blocks])))


@pytest.mark.slow
@given(st.lists(BLOCKS, min_size=1, max_size=6), st.integers(1, 4), st.data())
def test_plan_with_splits_names_who_needs_each_row(
    steps: list[list[set[int]]], num_replicas: int, data: st.DataObject
) -> None:
    splits: list[BlockSplit] = []
    for blocks in steps:
        places = st.lists(
            st.integers(0, len(blocks)), min_size=num_replicas - 1, max_size=num_replicas - 1
        )
        edges = [0, *sorted(data.draw(places)), len(blocks)]
        splits.append(BlockSplit(blocks_of(blocks), np.array(edges)))
    entries = [np.array(sorted(set().union(*blocks)), np.int64) for blocks in steps]
    index = zip(entries, next_use(entries, 9), strict=True)
    found = list(Plan(index, CacheConfig(prefetch_steps=1, lookahead=2), splits=splits))
    for now, (step, blocks) in enumerate(zip(found, steps, strict=True)):
        sharing, edges = step.sharing, splits[now].edges.tolist()
        assert sharing is not None
        for place, number in enumerate(step.numbers.tolist()):
            users = [
                r
                for r in range(num_replicas)
                if any(number in b for b in blocks[edges[r] : edges[r + 1]])
            ]
            assert np.flatnonzero(sharing.touches[:, place]).tolist() == users
            assert sharing.owner[place] == users[0]
            shared = len(users) > 1
            soon = now + 1 < len(steps) and any(number in b for b in steps[now + 1])
            assert sharing.local[place] == (not shared)
            assert sharing.shared_next[place] == (shared and soon)
            assert sharing.shared_later[place] == (shared and not soon)


def test_plan_without_splits_names_nobody() -> None:
    index = [(np.array([0, 1]), np.array([0, 0], np.int32))]
    assert next(Plan(index, CacheConfig())).sharing is None


@pytest.mark.parametrize("edges", [[0, 1], [1, 2], [0, 2, 1, 2]])
def test_share_with_edges_that_miss_blocks_raises(edges: list[int]) -> None:
    message = f"edges must rise from 0 to the 2 blocks of the step, got {edges}; split whole blocks"
    blocks = Jagged(np.array([4, 7]), np.array([0, 1, 2]))
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        classify_rows(np.array([4, 7]), np.array([1, 1]), BlockSplit(blocks, np.array(edges)))


@pytest.mark.parametrize("numbers", [[4], [4, 7, 9], [4, 8]])
def test_share_with_blocks_of_another_step_raises(numbers: list[int]) -> None:
    message = "blocks and numbers have different rows; pass those of the same step"
    split = BlockSplit(Jagged(np.array([4, 7]), np.array([0, 1, 2])), np.array([0, 2]))
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        classify_rows(np.array(numbers), np.ones(len(numbers), np.int64), split)
