"""The grid of both pools: its fit, and the errors of the defaults that the scheduler ships."""

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.scheduler.fit import (
    GRID_FILE,
    fit_constants,
    is_held_back,
    largest_cell,
    predicted_build,
    predicted_step,
    read_cells,
)

PREDICTED = {"builds": predicted_build, "steps": predicted_step}
HELD_BACK_ERROR, LARGEST_ERROR = 0.1, 0.15


@pytest.mark.parametrize("kind", PREDICTED)
def test_shipped_defaults_predict_held_back_cells_of_the_grid(kind: str) -> None:
    rows = read_cells(GRID_FILE, kind)
    largest = largest_cell(rows)
    took = np.array([row["seconds"] for row in rows])
    errors = np.abs(np.array([PREDICTED[kind](row) for row in rows]) / took - 1.0)
    held = is_held_back(rows, largest)
    assert held.sum() >= 0.2 * len(rows)
    assert errors[held].mean() <= HELD_BACK_ERROR
    assert errors[largest] <= LARGEST_ERROR


def test_fit_of_exact_times_finds_their_constants() -> None:
    rng = np.random.default_rng(0)
    true = {"small": 2e-7, "none": 0.0, "large": 3.0}
    terms = [dict(zip(true, rng.uniform(1, 9, 3).tolist(), strict=True)) for _ in range(20)]
    seconds = np.array([sum(true[name] * value for name, value in t.items()) for t in terms])
    found = fit_constants(terms, seconds)
    assert found["large"] == pytest.approx(3.0)
    assert found["none"] == pytest.approx(0.0, abs=1e-9)
    assert found["small"] == pytest.approx(2e-7, abs=1e-9)


def test_read_cells_keeps_the_fastest_run_of_each(tmp_path: Path) -> None:
    sizes = {"log": "demo-100", "workers": 1, "cpus": 1.0}
    runs = [{**sizes, "seconds": sec, "memory_gib": 8.0} for sec in (3.0, 2.0, 4.0)]
    small = {**sizes, "seconds": 1.0, "memory_gib": 2.0}
    other = {**sizes, "workers": 2, "seconds": 5.0, "memory_gib": 8.0}
    path = tmp_path / "pools.json"
    path.write_text(json.dumps({"builds": [*runs, small, other], "steps": []}))
    assert read_cells(path, "builds") == [runs[1], other]
