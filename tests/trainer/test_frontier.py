"""All replicas take segments in at the same step, whoever sees them first."""

from __future__ import annotations

import re
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from presage.schemas.config.job import OrderConfig, load_job
from presage.schemas.config.train import FollowConfig
from presage.schemas.dataset.order import Order
from presage.schemas.errors import PlanError
from presage.schemas.storage.location import Location
from presage.trainer.growing.follow import FollowedDataset
from presage.trainer.growing.frontier import DatasetRefusedError, Frontier
from presage.trainer.options import TrainOptions
from presage.trainer.recovery import Drain
from presage.trainer.steps import (
    DatasetExtent,
    Horizon,
    Span,
    common_extent,
    horizon_of,
    next_action,
)
from presage.trainer.stores.store import BehindError
from tests.trainer.growing import Versions, grown_versions

FIRST = DatasetExtent(num_segments=1, sealed=False)
PREFETCH_STEPS = 3
NUM_STEPS = 22


@pytest.fixture(scope="module")
def versions() -> list[Path]:
    """The dataset after each segment."""
    return grown_versions()


class Member:
    """One replica's frontier, its own copy of the dataset, and the steps at which it was extended.

    Reads are issued as a cache does, without rows.
    """

    def __init__(self, versions: list[Path], dataset: Path) -> None:
        self.versions = Versions(versions, dataset)
        self.extensions: list[tuple[int, Horizon]] = []
        self._next = self._last = 0
        job = load_job(versions[0].parent / "job" / "job.yaml")
        at_once = replace(job.train, follow=FollowConfig(poll=timedelta(microseconds=1)))
        job = replace(job, train=at_once)
        how = TrainOptions(follow=True, embedding="cached")
        data = FollowedDataset(Location.parse(dataset), job, how, Drain())
        data.wait_for(0)
        self.frontier = Frontier(data, FIRST, Drain(), 0.01)
        self._last = self.horizon.end_step

    @property
    def horizon(self) -> Horizon:
        return self.frontier.span.horizon

    def stop_reading(self) -> int:
        self._last = min(self._last, self._next)
        return self._last

    def extend(self, span: Span, step: int) -> None:
        assert step >= self._next, "no read is in flight"
        self.extensions.append((step, span.horizon))
        self._last = span.horizon.end_step

    def train(self, step: int) -> None:
        assert step < self._last, "the step may be read"
        self._next = max(self._next, min(step + PREFETCH_STEPS + 1, self._last))

    def join(self, other: Frontier, step: int) -> None:
        settled = self.frontier.load(other.to_arrays())
        self._next, self._last = step, self.horizon.end_step
        if settled is not None:
            self._last = min(self._last, settled)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_members_are_extended_at_the_same_step_whoever_reads_a_segment_first(
    seed: int, versions: list[Path], tmp_path: Path
) -> None:
    chance = np.random.default_rng(seed)
    members = [Member(versions, tmp_path / f"seen-{n}") for n in range(3)]
    joins, step, missed = int(chance.integers(NUM_STEPS)), 0, 0
    while next_action(step, members[0].horizon) != "end":
        ready = members if step > joins else members[:2]
        for member in members:
            if chance.random() < 0.3:
                member.versions.commit_next()
            member.frontier.refresh()
        known = common_extent([member.frontier.visible for member in ready])
        if next_action(step, members[0].horizon) == "wait":
            assert len({m.frontier.advance(known, step, m.extend) for m in ready}) == 1
            if next_action(step, members[0].horizon) != "train":
                continue
        state = members[0].frontier.state
        for member in ready:
            member.train(step)
            member.frontier.check(known, state)
            member.frontier.on_commit(known, step + 1, member.stop_reading, member.extend)
        if step == joins:
            for _ in versions:
                members[
                    2
                ].versions.commit_next()  # it waits until it sees what the others have agreed on
            members[2].join(members[0].frontier, step + 1)
            missed = len(members[0].extensions)
        step += 1
        assert len({member.frontier.state for member in members[: 2 + (step > joins)]}) == 1
    assert step == NUM_STEPS
    assert members[0].extensions == members[1].extensions
    assert members[2].extensions == members[0].extensions[missed:]


@pytest.fixture
def waiting(versions: list[Path], tmp_path: Path) -> Member:
    """One that has trained all steps of the first segment and sees the second."""
    found = Member(versions, tmp_path / "dataset")
    for step in range(found.horizon.end_step):
        found.train(step)
    found.versions.commit_next()
    found.frontier.refresh()
    return found


def test_member_with_a_step_that_others_do_not_know_is_restarted(waiting: Member) -> None:
    frontier, state = waiting.frontier, waiting.frontier.state
    until = frontier.span.horizon.end_step
    assert frontier.advance(frontier.visible, until, waiting.extend)
    frontier.check(frontier.visible, state)  # the writer may have asked before it knew
    with pytest.raises(BehindError, match="restart it"):
        frontier.check(FIRST, state)
    with pytest.raises(BehindError, match="restart it"):
        frontier.on_commit(FIRST, until + 1, waiting.stop_reading, waiting.extend)


def test_member_that_differs_from_the_writer_is_restarted(waiting: Member) -> None:
    before = waiting.frontier.state
    waiting.frontier.on_commit(waiting.frontier.visible, 12, waiting.stop_reading, waiting.extend)
    waiting.frontier.check(FIRST, waiting.frontier.state)
    with pytest.raises(BehindError, match=re.escape(f"instead of {before}")):
        waiting.frontier.check(waiting.frontier.visible, before)


def test_what_cannot_be_taken_in_is_refused_and_nothing_has_changed(waiting: Member) -> None:
    before = waiting.frontier.state

    def refuse(span: Span, step: int) -> None:
        raise PlanError("cache must be larger")

    with pytest.raises(DatasetRefusedError, match=r"^cache must be larger$"):
        waiting.frontier.advance(waiting.frontier.visible, 12, refuse)
    assert waiting.frontier.state == before


COUNTS = st.lists(st.integers(0, 9), min_size=1, max_size=6)


def order_of(counts: list[int], epochs: int, shuffle: str = "blocks") -> Order:
    """Return an order of two blocks a batch."""
    config = OrderConfig(shuffle="blocks" if shuffle == "blocks" else "none", seed=3)
    return Order(tuple(counts), 2, epochs, config)


@given(COUNTS, st.integers(1, 3), st.sampled_from(["none", "blocks"]))
def test_steps_before_a_horizon_are_those_of_the_finished_dataset(
    counts: list[int], epochs: int, shuffle: str
) -> None:
    whole = order_of(counts, epochs, shuffle)
    for n in range(1, len(counts) + 1):
        then = order_of(counts[:n], epochs, shuffle)
        known = DatasetExtent(num_segments=n, sealed=False)
        assert horizon_of(then, known) == horizon_of(whole, known)
        for step in range(horizon_of(then, known).end_step):
            a, b = then.step(step), whole.step(step)
            assert (a.epoch, a.segment) == (b.epoch, b.segment) == (0, a.segment)
            assert np.array_equal(a.positions, b.positions)


@given(COUNTS, st.integers(1, 3), st.integers(0, 60))
def test_run_over_growing_segments_trains_each_step_once_and_ends(
    counts: list[int], epochs: int, stop: int
) -> None:
    for limit in (None, stop):
        step, waits, horizon = 0, 0, Horizon(end_step=0, known_end=0, is_final=False)
        for n in range(1, len(counts) + 1):
            known = DatasetExtent(num_segments=n, sealed=n == len(counts))
            horizon = horizon_of(order_of(counts[:n], epochs), known, limit)
            while next_action(step, horizon) == "train":
                step += 1
            waits += next_action(step, horizon) == "wait"
            if next_action(step, horizon) == "end":
                break
        total = order_of(counts, epochs).num_steps
        assert next_action(step, horizon) == "end"
        assert step == (total if limit is None else min(total, limit))
        assert waits < len(counts)


@given(st.lists(st.tuples(st.integers(0, 5), st.booleans()), min_size=1, max_size=5))
def test_agreed_extent_is_known_to_all_in_any_order(states: list[tuple[int, bool]]) -> None:
    known = [DatasetExtent(num_segments=n, sealed=f) for n, f in states]
    found = common_extent(known)
    assert found == common_extent(known[::-1]) == common_extent([found, *known])
    assert all(found.num_segments <= state.num_segments for state in known)
    assert found.sealed == all(state.sealed for state in known)


@pytest.mark.parametrize(
    ("known", "num_segments"),
    [
        (DatasetExtent(num_segments=3, sealed=False), 2),
        (DatasetExtent(num_segments=1, sealed=True), 2),
    ],
)
def test_order_of_other_segments_is_refused(known: DatasetExtent, num_segments: int) -> None:
    message = (
        f"order is of {num_segments} segments, but the dataset has {known.num_segments}; "
        "open the dataset again"
    )
    with pytest.raises(PlanError, match=f"^{re.escape(message)}$"):
        horizon_of(order_of([4] * num_segments, 1), known)


def test_empty_horizon_of_an_open_dataset_is_waited_at() -> None:
    horizon = horizon_of(order_of([0, 4], 2), DatasetExtent(num_segments=1, sealed=False))
    assert horizon == Horizon(end_step=0, known_end=0, is_final=False)
    assert next_action(0, horizon) == "wait"
