"""The gate: which model passes, and the reasons of a refusal."""

import math
from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from presage.scheduler.retrain.decide import judge
from presage.scheduler.retrain.records import ModelMetrics
from presage.schemas.config.schedule import ModelGateConfig

OLD = ModelMetrics(num_samples=500, ne=0.8, auc=0.75, calibration=1.02)
LIMITS = ModelGateConfig()
OFF = ModelGateConfig(
    **{f.name: None for f in fields(ModelGateConfig) if f.name != "min_samples"}  # pyright: ignore[reportArgumentType]: of a table
)

REFUSED = {
    "NE of a useless model": ({"ne": 1.2}, None, ("NE 1.2 is above 1 (gate.max_ne)",)),
    "AUC of a coin that falls wrong": (
        {"auc": 0.49},
        None,
        ("AUC 0.49 is below 0.5 (gate.min_auc)",),
    ),
    "calibration below": (
        {"calibration": 0.7},
        None,
        ("distance of the calibration from 1 0.3 is above 0.25 (gate.max_calibration_error)",),
    ),
    "NE above the last": (
        {"ne": 0.809},
        OLD,
        ("NE 0.809 is above 0.808 for 0.8 before (gate.max_ne_increase)",),
    ),
    "AUC below the last": (
        {"auc": 0.742},
        OLD,
        ("AUC 0.742 is below 0.7425 for 0.75 before (gate.max_auc_decrease)",),
    ),
    "calibration farther than the last": (
        {"calibration": 0.87},
        OLD,
        (
            "distance of the calibration from 1 0.13 is above 0.12 for 0.02 before "
            "(gate.max_calibration_drift)",
        ),
    ),
    "no AUC, as one class is held back": (
        {"auc": None},
        OLD,
        (
            "AUC has no value (gate.min_auc)",
            "AUC has no value for 0.75 before (gate.max_auc_decrease)",
        ),
    ),
    "NE that is no number": ({"ne": math.nan}, None, ("NE nan is above 1 (gate.max_ne)",)),
    "nothing held back, and nothing else is said": (
        {"num_samples": 0, "ne": None},
        OLD,
        ("evaluation has 0 samples, less than 1 (gate.min_samples)",),
    ),
}


@pytest.mark.parametrize(("change", "old", "reasons"), REFUSED.values(), ids=REFUSED.keys())
def test_judge_of_a_model_beyond_a_limit_names_value_limit_and_key(
    change: dict[str, float], old: ModelMetrics | None, reasons: tuple[str, ...]
) -> None:
    new = replace(OLD, **change)  # pyright: ignore[reportArgumentType]: of a table
    assert judge(new, old, LIMITS) == reasons


def test_judge_of_a_model_at_its_limits_passes() -> None:
    at = replace(OLD, ne=0.8 * 1.01, auc=0.75 * 0.99, calibration=1.1199)
    assert judge(at, OLD, LIMITS) == ()
    assert judge(replace(OLD, ne=1.0, auc=0.5, calibration=1.25), None, LIMITS) == ()


def test_judge_against_a_model_without_values_has_the_absolute_limits_alone() -> None:
    old = replace(OLD, ne=None, auc=None, calibration=None)
    assert judge(replace(OLD, ne=0.99, auc=0.51), old, LIMITS) == ()


NUMBERS = st.floats(0.01, 2.0)
METRICS = st.builds(
    ModelMetrics,
    num_samples=st.integers(1, 9),
    ne=NUMBERS,
    auc=st.floats(0, 1),
    calibration=NUMBERS,
)


@given(new=METRICS, old=st.none() | METRICS, worse=st.floats(0, 1))
def test_law_a_model_that_is_worse_has_no_fewer_reasons(
    new: ModelMetrics, old: ModelMetrics | None, worse: float
) -> None:
    assert new.ne is not None
    assert new.auc is not None
    assert new.calibration is not None
    away = new.calibration + (worse if new.calibration >= 1 else -worse)
    for bad in (
        replace(new, ne=new.ne + worse),
        replace(new, auc=new.auc - worse),
        replace(new, calibration=away),
    ):
        assert len(judge(bad, old, LIMITS)) >= len(judge(new, old, LIMITS))


@given(new=METRICS, old=st.none() | METRICS)
def test_law_without_limits_everything_passes(new: ModelMetrics, old: ModelMetrics | None) -> None:
    assert judge(new, old, OFF) == ()
    assert judge(replace(new, ne=None, auc=None, calibration=None), old, OFF) == ()
