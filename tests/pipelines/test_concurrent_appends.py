"""Appends of many processes at once: each acknowledged one is there once, nothing else is."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from presage.schemas.storage.location import Location
from tests.fault_proxy import FAULTS, Faults
from tests.object_store import Store
from tests.pipelines.concurrent_appends import (
    check,
    check_nothing_else,
    first_segment,
    prepare,
    run_writers,
)

pytestmark = pytest.mark.nightly

RATE = 0.02
"""Probability of each kind of fault, for each request."""


def race_at_store(
    store: Store,
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    writers: int,
    rounds: int,
    kills: int = 0,
    seed: int = 0,
) -> None:
    """Run writers through a proxy with drawn faults, and check the dataset without it."""
    for name, value in store.environment.items():
        monkeypatch.setenv(name, value)
    drawn = random.Random(seed)
    appends = prepare(folder, Location.parse(f"{store.new_url()}/dataset"), writers, rounds)
    first_segment(appends)
    faults = Faults(rates=dict.fromkeys(FAULTS, RATE), seed=seed)
    times = [drawn.uniform(0.5, 2.0 * rounds) for _ in range(kills)]
    with store.behind_proxy(faults) as proxy:
        run_writers(appends, writers, rounds, proxy.environment, times, seed)
    assert faults.counts.total() > 10
    check(appends, writers, rounds)
    check_nothing_else(appends.dataset)


@pytest.mark.slow
def test_appends_on_a_local_disk_all_survive(tmp_path: Path) -> None:
    appends = prepare(tmp_path / "work", Location.parse(tmp_path / "dataset"), 4, 2)
    first_segment(appends)
    run_writers(appends, 4, 2, {}, kills=[1.0, 1.5])
    check(appends, 4, 2)
    check_nothing_else(appends.dataset)


@pytest.mark.slow
def test_appends_at_a_store_with_faults_and_kills_all_survive(
    s3_store: Store, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    race_at_store(s3_store, monkeypatch, tmp_path / "work", 4, 2, kills=4)


@pytest.mark.slow
@pytest.mark.parametrize("fixture", ["gcs_store", "azure_store"])
def test_appends_at_another_store_with_faults_all_survive(
    fixture: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    race_at_store(request.getfixturevalue(fixture), monkeypatch, tmp_path / "work", 3, 1)


@pytest.mark.chaos
@pytest.mark.timeout(3600)
def test_appends_of_32_writers_in_10_rounds_all_survive(
    s3_store: Store, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    race_at_store(s3_store, monkeypatch, tmp_path / "work", 32, 10)


@pytest.mark.chaos
@pytest.mark.parametrize("seed", range(200))
def test_drawn_kills_and_faults_lose_no_append(
    s3_store: Store, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, seed: int
) -> None:
    drawn = random.Random(seed)
    writers, rounds = drawn.randrange(2, 5), drawn.randrange(1, 3)
    kills = drawn.randrange(1, 6)
    race_at_store(s3_store, monkeypatch, tmp_path / "work", writers, rounds, kills, seed)
