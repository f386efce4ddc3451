"""`scheduler fit`: models of the throughputs in a CSV file, one per job, and held-out rows."""

from __future__ import annotations

import csv
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from presage.scheduler.model.throughput import (
    TRAINING_TERMS,
    Fit,
    TrainingSetting,
    Window,
    fit_window,
    observe,
    predict_seconds,
)
from presage.schemas.errors import SchemaError, suggest_name

SPEED = "samples_per_sec"
REQUIRED = ("job", "num_replicas", SPEED)
SETTING_COLUMNS = {
    "num_replicas": "num_replicas",
    "num_stores": "num_stores",
    "replica_cpus": "replica_cpus",
    "store_cpus": "store_cpus",
    "batch_size": "batch_samples",
    "unique_rows": "unique_rows",
    "fetched_rows": "fetched_rows",
    "moved_bytes": "moved_bytes",
}
"""Columns and their fields of a setting; a column that is absent or empty means the default."""
OPERATORS: Mapping[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
    "": operator.eq,
}


@dataclass(frozen=True, slots=True)
class Measurements:
    """Rows of one file.

    Attributes:
        rows: by job, in order of the file; all values as text.
        num_skipped: rows without a speed, or with a speed of 0.
    """

    rows: Mapping[str, Sequence[Mapping[str, str]]]
    num_skipped: int


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFit:
    """A model of one job and its errors in throughput."""

    coefficients: Mapping[str, float]
    num_fitted: int
    num_held_back: int
    mape_fit: float
    """Mean absolute percentage error of the fitted rows, as a share."""
    mape_holdout: float | None
    """The same of the held-back rows; None if there are none."""
    inside: float | None
    """Share of the held-back rows inside their interval; None if there are none."""
    confident: bool
    """Whether every interval is narrow enough to act upon."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileFit:
    """Models of all jobs of one file: what `fit --json` prints."""

    jobs: Mapping[str, JobFit]
    mape_holdout: float | None
    """Over the held-back rows of all jobs; None if there are none."""
    num_skipped: int


def fit_file(path: Path, holdouts: Sequence[str]) -> FileFit:
    """Fit every job of a file.

    Args:
        path: measurements.
        holdouts: a row that matches all conditions of one of these is predicted, not fitted.

    Raises:
        SchemaError: the file is not valid.
        ValueError: a holdout is not a condition, or leaves a job without rows to fit.
    """
    read = read_measurements(path)
    columns = list(next(iter(read.rows.values()))[0])
    conditions = [parse_holdout(text, columns) for text in holdouts]
    jobs = {
        job: fit_job(rows, lambda row: any(matches(row) for matches in conditions))
        for job, rows in read.rows.items()
    }
    held = [(fit.mape_holdout, fit.num_held_back) for fit in jobs.values() if fit.num_held_back]
    total = sum(count for _, count in held)
    mean = sum((error or 0.0) * count for error, count in held) / total if total else None
    return FileFit(jobs=jobs, mape_holdout=mean, num_skipped=read.num_skipped)


def fit_summary(job: str, fit: JobFit) -> str:
    """Return the model of a job in one line."""
    terms = ", ".join(f"{name} {value:.3g}" for name, value in fit.coefficients.items() if value)
    held = ""
    if fit.num_held_back:
        held = (
            f", {fit.num_held_back} held back {fit.mape_holdout:.1%} off, "
            f"{fit.inside:.0%} inside their interval"
        )
    trust = "" if fit.confident else ", low confidence"
    return f"{job}: {fit.num_fitted} fitted {fit.mape_fit:.1%} off{held}{trust}; {terms}"


def read_measurements(path: Path) -> Measurements:
    """Read a file of measurements.

    Raises:
        SchemaError: it cannot be read, lacks a column, or has a value that is not a number.
    """
    try:
        with path.open(encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file)
            columns = reader.fieldnames or ()
            lines = list(enumerate(reader, start=2))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise SchemaError(
            f"measurements cannot be read as CSV: {error}; check the path", file=str(path)
        ) from error
    for name in REQUIRED:
        if name not in columns:
            raise SchemaError(
                f"measurements lack column {name!r}; add it",
                file=str(path),
            )
    rows: dict[str, list[Mapping[str, str]]] = {}
    skipped = 0
    for number, row in lines:
        for name in (SPEED, *SETTING_COLUMNS):
            _check(row, name, path, number)
        if not row[SPEED] or float(row[SPEED]) == 0.0:
            skipped += 1
            continue
        rows.setdefault(row["job"], []).append(row)
    if not rows:
        raise SchemaError(
            f"measurements have no row with a speed: {skipped} without; measure again",
            file=str(path),
        )
    return Measurements(rows, skipped)


def parse_holdout(text: str, columns: Sequence[str]) -> Callable[[Mapping[str, str]], bool]:
    """Return a predicate of rows: whether they match every `COLUMN=VALUE` of a text.

    A value may start with >=, <=, > or <. Empty cells match nothing.

    Raises:
        ValueError: a part is not a condition, or names an unknown column.

    Example:
        >>> matches = parse_holdout("job=dssm,num_replicas=>=13", ["job", "num_replicas"])
        >>> matches({"job": "dssm", "num_replicas": "13"})
        True
        >>> matches({"job": "dssm", "num_replicas": "11"})
        False
    """
    conditions: list[Callable[[Mapping[str, str]], bool]] = []
    for part in text.split(","):
        column, equals, value = part.partition("=")
        if not equals or not value:
            raise ValueError(f"holdout must be COLUMN=VALUE, got {part!r}; write num_replicas=>=13")
        if column not in columns:
            raise ValueError(
                f"holdout names an unknown column: {column!r}; {suggest_name(column, set(columns))}"
            )
        conditions.append(_condition(column, value))
    return lambda row: all(condition(row) for condition in conditions)


def fit_job(
    rows: Sequence[Mapping[str, str]], held_back: Callable[[Mapping[str, str]], bool]
) -> JobFit:
    """Fit the rows of one job that are not held back, and predict the others.

    Raises:
        ValueError: all are held back.
    """
    fitted_rows = [row for row in rows if not held_back(row)]
    held_rows = [row for row in rows if held_back(row)]
    if not fitted_rows:
        raise ValueError(
            f"holdout leaves no row to fit: all {len(rows)} of job {rows[0]['job']!r}; "
            "hold fewer back"
        )
    fit = fit_rows(fitted_rows)
    mape_fit, _, confident = _score(fit, fitted_rows)
    mape_holdout, inside, held_confident = None, None, True
    if held_rows:
        mape_holdout, inside, held_confident = _score(fit, held_rows)
    return JobFit(
        coefficients=dict(zip(TRAINING_TERMS, fit.coefficients, strict=True)),
        num_fitted=len(fitted_rows),
        num_held_back=len(held_rows),
        mape_fit=mape_fit,
        mape_holdout=mape_holdout,
        inside=inside,
        confident=confident and held_confident,
    )


def fit_rows(rows: Sequence[Mapping[str, str]]) -> Fit:
    """Fit the rows of one job."""
    return fit_window(observe(Window(), setting_of(rows), step_sec(rows), 0.0), TrainingSetting)


def setting_of(rows: Sequence[Mapping[str, str]]) -> TrainingSetting:
    """Return the settings of rows."""
    values = {
        field: np.array([float(row.get(column) or _default(field)) for row in rows])
        for column, field in SETTING_COLUMNS.items()
    }
    return TrainingSetting(**values)


def step_sec(rows: Sequence[Mapping[str, str]]) -> np.ndarray:
    """Return (n,) seconds of a step."""
    return np.array([float(row.get("batch_size") or 1.0) / float(row[SPEED]) for row in rows])


def _default(field: str) -> float:
    return 0.0 if field == "num_stores" else 1.0


def _score(fit: Fit, rows: Sequence[Mapping[str, str]]) -> tuple[float, float, bool]:
    """Return the mean error of throughput, the share inside the intervals, and confidence."""
    seconds, predicted = step_sec(rows), predict_seconds(fit, setting_of(rows))
    inside = (predicted.low <= seconds) & (seconds <= predicted.high)
    error = np.mean(np.abs(seconds / predicted.seconds - 1.0))
    return float(error), float(inside.mean()), bool(predicted.confident.all())


def _condition(column: str, value: str) -> Callable[[Mapping[str, str]], bool]:
    sign = next(sign for sign in OPERATORS if value.startswith(sign))
    operand = value.removeprefix(sign)
    try:
        number = float(operand)
    except ValueError:
        if sign:
            raise ValueError(f"holdout compares with a text: {value!r}; write {sign}13") from None
        return lambda row: row[column] == operand

    def matches(row: Mapping[str, str]) -> bool:
        return _is_number(row[column]) and OPERATORS[sign](float(row[column]), number)

    return matches


def _is_number(text: str | None) -> bool:
    try:
        return math.isfinite(float(text or "nan"))
    except ValueError:
        return False


def _check(row: Mapping[str, str | None], name: str, path: Path, number: int) -> None:
    text = row.get(name)
    if not text and name != "num_replicas":
        return
    least = 0.0 if name in (SPEED, "num_stores", "fetched_rows", "moved_bytes") else 1e-9
    if name == "num_replicas":
        least = 1.0
    if not _is_number(text) or float(text or "nan") < least:
        rule = "at least 1" if least == 1.0 else "not negative" if least == 0.0 else "positive"
        raise SchemaError(
            f"{name} must be a number, {rule}, got {text!r}; correct or remove the row",
            file=str(path),
            location=str(number),
        )
