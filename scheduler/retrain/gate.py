"""Whether a model is good enough, and what is wrong with it."""

from __future__ import annotations

from scheduler.retrain.records import Metrics
from schemas.job_retrain import ModelGateConfig


def judge(new: Metrics, old: Metrics | None, limits: ModelGateConfig) -> tuple[str, ...]:
    """Return what keeps a model from being promoted, in words; nothing where it is good.

    Args:
        new: of the model, on the newest held-back range.
        old: of the last promoted model on the same range; None where there is none.
        limits: of the job file.
    """
    if new.num_samples < limits.min_samples:
        return (
            f"{new.num_samples:,} samples are held back, of at least {limits.min_samples:,} "
            "(gate.min_samples)",
        )
    found = [*_absolute(new, limits), *([] if old is None else _relative(new, old, limits))]
    return tuple(reason for reason in found if reason)


def _absolute(new: Metrics, limits: ModelGateConfig) -> list[str]:
    """Return what is wrong with a model by itself; empty texts where nothing is."""
    most = limits.max_calibration_error
    return [
        _above("NE", new.ne, limits.max_ne, "(gate.max_ne)"),
        _below("AUC", new.auc, limits.min_auc, "(gate.min_auc)"),
        _above(_FAR, _distance(new), most, "(gate.max_calibration_error)"),
    ]


def _relative(new: Metrics, old: Metrics, limits: ModelGateConfig) -> list[str]:
    """Return what is worse than in the last promoted model; where that has no value, nothing is."""
    found: list[str] = []
    if old.ne is not None and limits.max_ne_increase is not None:
        most = old.ne * (1 + limits.max_ne_increase)
        where = f"for {old.ne:.5g} before (gate.max_ne_increase)"
        found.append(_above("NE", new.ne, most, where))
    if old.auc is not None and limits.max_auc_decrease is not None:
        least = old.auc * (1 - limits.max_auc_decrease)
        where = f"for {old.auc:.5g} before (gate.max_auc_decrease)"
        found.append(_below("AUC", new.auc, least, where))
    far = _distance(old)
    if far is not None and limits.max_calibration_drift is not None:
        most = far + limits.max_calibration_drift
        where = f"for {far:.5g} before (gate.max_calibration_drift)"
        found.append(_above(_FAR, _distance(new), most, where))
    return found


_FAR = "distance of the calibration from 1"


def _distance(metrics: Metrics) -> float | None:
    return None if metrics.calibration is None else abs(metrics.calibration - 1)


def _above(name: str, value: float | None, most: float | None, where: str) -> str:
    """Return the sentence about a value above its limit, or without a value; empty otherwise."""
    if most is None:
        return ""
    if value is None:
        return f"{name} has no value {where}"
    # Written so that NaN is above every limit.
    return "" if value <= most else f"{name} {value:.5g} is above {most:.5g} {where}"


def _below(name: str, value: float | None, least: float | None, where: str) -> str:
    """Return the sentence about a value below its limit, as `_above`."""
    if least is None:
        return ""
    if value is None:
        return f"{name} has no value {where}"
    return "" if value >= least else f"{name} {value:.5g} is below {least:.5g} {where}"
