"""Microbatches give the result of the whole batch, and the same bits whoever computes them."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from presage.schemas.config.job import load_job
from presage.trainer.components import uses_shared_features
from presage.trainer.embedding.kernels.compiled import merge
from presage.trainer.embedding.kernels.interface import RowSums
from presage.trainer.step import (
    MicrobatchCompute,
    Node,
    PartialSums,
    PhaseTimer,
    Tree,
    add_partial_sums,
)
from tests.shared import in_pairs
from tests.trainer.make_dataset import write_job
from tests.trainer.runs import final_rows, losses_of, parts_of, reader_of, run_job

ATTENTION = "{name: attention, history: clicked, target: item, top_layers: [16], num_heads: 2}"
MODELS = {
    "dlrm": "{top_layers: [16]}",
    "plain dlrm": "{top_layers: [16], dedup_compute: false}",
    "attention": ATTENTION,
    "dcn": "{name: dcn, top_layers: [16], cross_layers: 2, cross_rank: 4}",
    "deepfm": "{name: deepfm, top_layers: [16]}",
    "wide_deep": "{name: wide_deep, top_layers: [16]}",
}


@pytest.mark.slow
@pytest.mark.parametrize(("model", "optimizer"), in_pairs(MODELS, ["rowwise_adagrad", "adam"]))
def test_microbatches_are_the_whole_batch_up_to_rounding(
    model: str, optimizer: str, dataset: Path, tmp_path: Path
) -> None:
    job = write_job(tmp_path / "job", model=MODELS[model], optimizer=optimizer)
    for name in ("microbatches", "whole"):
        run_job(job, dataset, tmp_path / name, fast=name == "whole")
    losses, whole = losses_of(tmp_path / "microbatches"), losses_of(tmp_path / "whole")
    assert len(losses) == 32
    np.testing.assert_allclose(losses, whole, rtol=1e-9, atol=0)
    ours, other = final_rows(tmp_path / "microbatches"), final_rows(tmp_path / "whole")
    assert list(ours) == list(other)
    for name, rows in ours.items():
        np.testing.assert_allclose(rows, other[name], rtol=1e-6, atol=1e-9, err_msg=name)


@pytest.mark.slow
def test_bits_do_not_depend_on_threads(dataset: Path, tmp_path: Path) -> None:
    job = write_job(tmp_path / "job", dtype="float32")
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            run_job(job, dataset, tmp_path / str(threads))
    finally:
        torch.set_num_threads(before)
    one = final_rows(tmp_path / "1")
    for other in ("2", "3"):
        assert (losses_of(tmp_path / "1") == losses_of(tmp_path / other)).all()
        found = final_rows(tmp_path / other)
        assert all(np.array_equal(one[name], found[name]) for name in one)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(
    ("cuts", "size"), [((1,), 16), ((3,), 16), ((1, 2), 16), ((1, 2, 3), 16), ((3, 4), 8)]
)
def test_bits_do_not_depend_on_who_computes_which_microbatch(
    model: str, cuts: tuple[int, ...], size: int, dataset: Path, tmp_path: Path
) -> None:
    path = write_job(tmp_path / "job", dtype="float32", model=MODELS[model])
    job = load_job(path).train
    shared, count = uses_shared_features(job), 64 // size
    reader = reader_of(path, dataset, find_shared=shared, microbatch_samples=size)
    every = reader.read_microbatches(2)
    assert every.num_microbatches == count

    def computed(first: int, end: int) -> dict:
        parts = parts_of(path, dataset)
        microbatches = reader.read_microbatches(2, slice(first, end), every.rows)
        with MicrobatchCompute(parts, PhaseTimer(lambda: 0.0)) as compute:
            compute.open(microbatches)
            return compute.sums_of(microbatches).held

    joined = Tree(count, add_partial_sums)
    for first, end in pairwise((0, *cuts, count)):
        for node, value in computed(first, end).items():
            joined.add(node, value)
    assert same(joined.total(), *computed(0, count).values())
    assert not same(joined.total(), *computed(1, 2).values())


def same(one: PartialSums, other: PartialSums) -> bool:
    """Return whether two sums have the same bits."""
    return (
        (one.loss, one.weight) == (other.loss, other.weight)
        and torch.equal(one.dense, other.dense)
        and torch.equal(one.rows.rows, other.rows.rows)
        and torch.equal(one.rows.sums, other.rows.sums)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("seed", range(20))
def test_sums_are_merged_as_by_hand(seed: int, dtype: torch.dtype) -> None:
    chance = np.random.default_rng(seed)
    sides: list[RowSums] = []
    for _ in range(2):
        rows = np.flatnonzero(chance.random(chance.integers(0, 60)) < 0.5)
        sums = torch.from_numpy(chance.normal(size=(len(rows), 5))).to(dtype)
        sides.append(RowSums(torch.from_numpy(rows).int(), sums))
    merged = merge(*sides)
    by_hand = {int(r): s.clone() for r, s in zip(sides[0].rows, sides[0].sums, strict=True)}
    for row, sums in zip(sides[1].rows.tolist(), sides[1].sums, strict=True):
        by_hand[row] = by_hand[row] + sums if row in by_hand else sums
    assert merged.rows.tolist() == sorted(by_hand)
    for row, sums in zip(merged.rows.tolist(), merged.sums, strict=True):
        assert torch.equal(sums, by_hand[row])


def test_rows_that_the_step_does_not_have_are_refused(dataset: Path, tmp_path: Path) -> None:
    reader = reader_of(write_job(tmp_path / "job"), dataset)
    rows = dict(reader.read_microbatches(1).rows)
    table = next(iter(rows))
    rows[table] = rows[table][1:]
    with pytest.raises(ValueError, match=f"1 rows of table '{table}'"):
        reader.read_microbatches(1, rows=rows)


def by_hand(values: list[str]) -> str:
    """Return the sum written out: halves at the largest power of two."""
    if len(values) == 1:
        return values[0]
    half = 1 << (len(values) - 1).bit_length() - 1
    return f"({by_hand(values[:half])}+{by_hand(values[half:])})"


def written(left: str, right: str) -> str:
    return f"({left}+{right})"


@given(st.integers(1, 40), st.lists(st.integers(1, 39), max_size=5), st.randoms())
def test_sum_does_not_depend_on_who_adds_what(
    num_leaves: int, cuts: list[int], chance: random.Random
):
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


def test_missing_and_repeated_leaves_are_refused():
    tree: Tree[int] = Tree(3, lambda a, b: a + b)
    tree.add(Node(0, 0), 1)
    with pytest.raises(ValueError, match="leaves are missing: the tree has 3"):
        tree.total()
    with pytest.raises(ValueError, match="node was added twice"):
        tree.add(Node(0, 0), 1)
    with pytest.raises(ValueError, match="num_leaves must be at least 1"):
        Tree(0, lambda a, b: a + b)
