"""All replicas take segments in at the same step, whoever sees them first."""

from __future__ import annotations

import re
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest

from schemas.config.job import load_job
from schemas.config.train import FollowConfig
from schemas.errors import PlanError
from schemas.storage import Location
from tests.trainer.growing import Versions, grown_versions
from trainer.follow import (
    DatasetExtent,
    FollowedDataset,
    Horizon,
    Span,
    common_extent,
    next_action,
)
from trainer.frontier import DatasetRefusedError, Frontier
from trainer.options import TrainOptions
from trainer.recovery import Drain
from trainer.stores.api import BehindError

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

    def settle(self) -> int:
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
def test_members_take_segments_in_at_the_same_step_whoever_sees_them_first(
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
            member.frontier.on_commit(known, step + 1, member.settle, member.extend)
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


def test_who_has_begun_a_step_that_others_do_not_know_is_started_again(waiting: Member) -> None:
    frontier, state = waiting.frontier, waiting.frontier.state
    until = frontier.span.horizon.end_step
    assert frontier.advance(frontier.visible, until, waiting.extend)
    frontier.check(frontier.visible, state)  # the writer may have asked before it knew
    with pytest.raises(BehindError, match="restart it"):
        frontier.check(FIRST, state)
    with pytest.raises(BehindError, match="restart it"):
        frontier.on_commit(FIRST, until + 1, waiting.settle, waiting.extend)


def test_who_knows_other_than_the_writer_is_started_again(waiting: Member) -> None:
    before = waiting.frontier.state
    waiting.frontier.on_commit(waiting.frontier.visible, 12, waiting.settle, waiting.extend)
    waiting.frontier.check(FIRST, waiting.frontier.state)
    with pytest.raises(BehindError, match=re.escape(f"for {before}")):
        waiting.frontier.check(waiting.frontier.visible, before)


def test_what_cannot_be_taken_in_is_refused_and_nothing_has_changed(waiting: Member) -> None:
    before = waiting.frontier.state

    def refuse(span: Span, step: int) -> None:
        raise PlanError("cache must be larger")

    with pytest.raises(DatasetRefusedError, match=r"^cache must be larger$"):
        waiting.frontier.advance(waiting.frontier.visible, 12, refuse)
    assert waiting.frontier.state == before
