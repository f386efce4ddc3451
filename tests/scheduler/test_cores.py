"""Cores fitted to processes that burst: enough, not many more, and an end to trying."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest

from presage.scheduler.model.elasticity import (
    GROWTH,
    HEADROOM,
    MIN_RATIO,
    NEED_MARGIN,
    CoreFit,
    Reading,
    estimate_need,
    fit_cores,
)

PEAKS = (1.0, 1.2, 1.35, 1.5, 1.75, 2.0)
NOISE = 0.05
BELOW = 0.12
"""Share of its need that a process may lack in the end."""
ABOVE = 0.3
"""Share over its need, or over busy cores with headroom, that it may have."""


def reading(cpus: float, peak: float, rng: np.random.Generator | None = None) -> Reading:
    """Return what a process does that keeps one core busy where nothing holds it up."""
    noise = np.ones(2) if rng is None else np.exp(NOISE * rng.standard_normal(2))
    kept = min(1.0, cpus / peak)
    return Reading(cpus, kept * float(noise[0]), float(noise[1]) / kept)


def simulate_fits(
    peak: float, cpus: float, count: int, rng: np.random.Generator | None = None
) -> list[CoreFit]:
    """Return what a process gets after each of its readings."""
    readings: list[Reading] = []
    found: list[CoreFit] = []
    for _ in range(count):
        readings.append(reading(cpus, peak, rng))
        found.append(fit_cores(readings))
        cpus = found[-1].cpus
    return found


def changes(found: Sequence[CoreFit]) -> int:
    return sum(one.cpus != after.cpus for one, after in pairwise(found))


@pytest.mark.parametrize("peak", PEAKS)
def test_fit_without_noise_ends_with_enough_and_stays(peak: float) -> None:
    for start in (0.3, 0.6, 1.0, 1.3, 2.2, 4.0):
        found = simulate_fits(peak, start * peak, 20)
        assert changes(found[12:]) == 0
        assert found[-1].cpus >= peak / MIN_RATIO
        assert found[-1].cpus <= (1.0 + ABOVE) * max(peak, HEADROOM)


@pytest.mark.parametrize("peak", PEAKS)
def test_fit_of_what_was_ample_never_ends_below_the_need(peak: float) -> None:
    for seed in range(10):
        rng = np.random.default_rng((seed, 1))
        found = simulate_fits(peak, float(rng.uniform(1.0, 3.0)) * peak, 40, rng)
        assert found[-1].cpus >= (1.0 - BELOW) * peak
        assert found[-1].cpus <= (1.0 + ABOVE) * max(peak, HEADROOM)
        assert changes(found[20:]) <= 2


@pytest.mark.slow
def test_fit_of_random_processes_is_enough_for_nearly_all_and_comes_to_rest() -> None:
    short, moved = 0, 0
    for seed in range(200):
        rng = np.random.default_rng((seed, 2))
        peak, start = float(rng.uniform(1.0, 2.0)), float(rng.uniform(0.5, 3.0))
        found = simulate_fits(peak, start * peak, 40, rng)
        short += found[-1].cpus < (1.0 - BELOW) * peak
        moved += changes(found[25:]) > 0
    assert short <= 2
    assert moved <= 9


@pytest.mark.parametrize("peak", [1.4, 1.5, 2.0])
def test_busy_share_of_too_few_cores_tells_nothing_but_steps_do(peak: float) -> None:
    few = [reading(share * peak, peak) for share in (0.9, 0.6, 0.3)]
    shares = [one.busy / one.cpus for one in few]
    assert shares == pytest.approx([1.0 / peak] * 3)
    shrunk = [reading(1.6 * peak, peak), reading(HEADROOM, peak)]
    found = fit_cores(shrunk)
    assert found.why == "needed"
    assert found.cpus == pytest.approx(NEED_MARGIN * peak, rel=0.03)


def test_fit_remembers_what_was_slower_however_often_more_was_enough() -> None:
    many = [reading(3.0, 1.5), reading(1.3, 1.5), *[reading(1.62, 1.5)] * 200]
    assert fit_cores(many).cpus == 1.62


WHY = {
    "idle": ([Reading(4.0, 1.0, 1.0)], HEADROOM),
    "trial": ([Reading(2.0, 1.7, 1.0)], GROWTH * 2.0),
    "kept": ([Reading(4.0, 1.0, 1.0), Reading(1.3, 1.01, 0.99)], 1.3),
    "needed": (
        [Reading(4.0, 1.0, 1.0), Reading(1.3, 0.8, 1.25)],
        NEED_MARGIN * 1.25 * 1.3,
    ),
}


@pytest.mark.parametrize("why", WHY)
def test_fit_says_why(why: str) -> None:
    readings, cpus = WHY[why]
    found = fit_cores(readings)
    assert found.why == why
    assert found.cpus == pytest.approx(cpus, rel=0.03)


def test_fit_after_a_straggler_gives_no_more_than_a_trial_above_what_it_had() -> None:
    slow = [reading(3.0, 1.2), Reading(1.3, 0.3, 4.0)]
    assert fit_cores(slow).cpus <= GROWTH * 3.0
    calm = [reading(3.0, 1.2), *[reading(1.3, 1.2)] * 3, Reading(1.3, 0.3, 4.0)]
    assert fit_cores(calm) == CoreFit(1.3, "kept", estimate_need(calm))


def test_fit_of_a_process_that_spins_comes_to_rest_near_what_was_enough() -> None:
    readings, cpus = [Reading(2.0, 2.0, 1.0)], 2.0
    for _ in range(20):
        cpus = fit_cores(readings).cpus
        readings.append(Reading(cpus, cpus, 1.0))
    assert cpus <= 1.1 * 2.0
    assert len({reading.cpus for reading in readings[5:]}) == 1
    assert max(reading.cpus for reading in readings) <= GROWTH * 2.0


@pytest.mark.parametrize("wrong", [0.0, -1.0, float("nan"), float("inf")])
def test_reading_that_is_not_positive_is_refused(wrong: float) -> None:
    for values in ((wrong, 1.0, 1.0), (1.0, wrong, 1.0), (1.0, 1.0, wrong)):
        with pytest.raises(ValueError, match="reading must be positive, got Reading"):
            Reading(*values)


@pytest.mark.slow
def test_need_explains_readings_as_well_as_any_other_number_of_cores() -> None:
    def error(readings: list[Reading], need: float) -> float:
        found = [np.log(r.step_sec) - max(0.0, np.log(need / r.cpus)) for r in readings]
        return float(np.abs(np.array(found) - np.median(found)).sum())

    for seed in range(50):
        rng = np.random.default_rng((seed, 3))
        peak = float(rng.uniform(1.0, 2.0))
        readings = [reading(float(cpus), peak, rng) for cpus in rng.uniform(0.7, 3.0, 12)]
        found = estimate_need(readings)
        tried = np.linspace(min(r.cpus for r in readings), max(r.cpus for r in readings), 500)
        best = min(error(readings, float(need)) for need in tried)
        assert error(readings, found.cpus) <= best + 0.1
        assert found.cpus == pytest.approx(peak, rel=0.2)


def test_fit_of_an_unknown_kind_leaves_no_number_of_cores_untried() -> None:
    for cpus in np.linspace(0.9, 3.0, 50):
        found = fit_cores([Reading(float(cpus), 1.0, 1.0)])
        assert abs(np.log(found.cpus / cpus)) > np.log(MIN_RATIO) * 0.99
