"""Sections on training runs and on the sizes of both pools."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipelines.report.charts import (
    OTHER,
    OURS,
    PALETTE,
    Bar,
    Line,
    Scale,
    bar_chart,
    curve_chart,
    smoothed,
    stacked_bars,
)
from pipelines.report.html import (
    Section,
    bullets,
    count,
    digits,
    figure,
    memory,
    paragraph,
    percent,
    ratio,
    size,
    table,
)
from schemas.errors import SchemaError
from schemas.run_log import (
    METRICS,
    PHASES,
    SUMMARY,
    RunSummary,
    StepMetric,
    read_metrics,
    read_summary,
)

PLAN, BUILD = "plan.json", "build.json"


def read_object(path: Path) -> Mapping[str, Any] | None:
    """Read a JSON object that a command printed, None when there is no such file.

    Raises:
        SchemaError: the file holds something else.
    """
    if not path.exists():
        return None
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise SchemaError(f"file must hold JSON, got {error}; print it anew", file=str(path)) from (
            error
        )
    if not isinstance(found, dict):
        raise SchemaError("file must hold a JSON object, got another value", file=str(path))
    return found


def pools_section(plan: Mapping[str, Any] | None, build: Mapping[str, Any] | None) -> Section:
    """Return the section about the build and both pools.

    Args:
        plan: what `scheduler plan --json` prints, or None.
        build: what `build --json` prints, or None; one of them is given.

    Raises:
        SchemaError: one lacks a key.
    """
    try:
        measured = _build_table(build) if build else ""
        if plan is not None:
            return _plan_section(plan, measured)
        assert build is not None, "a section about neither is not asked for"
        finding = f"The build made {count(build['rows_per_sec'])} samples per second."
    except (KeyError, TypeError) as error:
        name = PLAN if plan else BUILD
        raise SchemaError(
            f"{name} must have the keys of what its command prints, got no or another {error}; "
            "print it anew"
        ) from error
    return Section("plan", "Build", finding, measured)


def _plan_section(plan: Mapping[str, Any], measured: str) -> Section:
    before, after = plan["preprocessing"], plan["training"]
    stores = f" and {_counted(after['num_stores'], 'store')}" if after["num_stores"] else ""
    jobs = _counted(before["segment_jobs"], "segment job")
    pools = (
        f"{jobs} x {_counted(before['workers_per_job'], 'worker')}",
        f"{_counted(after['num_replicas'], 'replica')}{stores}",
    )
    rows = [
        ("processes", *pools),
        ("cores", f"{before['cpus']:g}", f"{after['cpus']:g}"),
        ("memory", memory(before["memory_bytes"]), memory(after["memory_bytes"])),
        (
            "samples per second",
            count(before["rows_per_sec"]),
            count(after["samples_per_sec"]),
        ),
    ]
    trust = "" if plan["confident"] else " The models behind it have seen too little to be sure."
    return Section(
        "plan",
        "Plan of both pools",
        f"{pools[0]} and {pools[1]} are predicted to go from raw log to trained model in "
        f"{digits(plan['predicted_sec'])} seconds and cost {plan['cost']:.3g} at the job's prices."
        f"{trust}",
        table("Sizes of both pools", ["", "preprocessing", "training"], rows)
        + paragraph("Why:")
        + bullets([str(reason) for reason in plan["reasons"]])
        + measured,
    )


def _build_table(build: Mapping[str, Any]) -> str:
    return table(
        "The build of this dataset, as it was measured",
        ["", "input", "samples", "start-up", "build", "samples per second"],
        [
            (
                "measured", size(build["input_bytes"]), count(build["num_samples"]),
                f"{build['startup_sec']:.1f} s", f"{build['wall_sec']:.1f} s",
                count(build["rows_per_sec"]),
            )
        ],
    )  # fmt: skip


def _counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


REST = "rest"
SHOWN_LOSSES = 0.95
"""Share of the losses that the axis of the loss curves reaches: early ones can be many times
larger, and would flatten all others."""


@dataclass(frozen=True, slots=True)
class Run:
    """A finished run.

    Attributes:
        name: of its directory.
        summary: of the whole run.
        metrics: of each step, in order.
    """

    name: str
    summary: RunSummary
    metrics: tuple[StepMetric, ...]

    @property
    def color(self) -> str:
        """Grey for what trains without deduplication."""
        if self.summary.expanded:
            return OTHER
        return OURS if self.summary.embedding == "plain" else PALETTE[1]


def read_runs(directory: Path | None) -> list[Run]:
    """Read a run, or every subdirectory that is one: deduplicated before expanded, then by name.

    Args:
        directory: of a finished run, or of several; None for no runs.

    Raises:
        SchemaError: a summary or a step metric is damaged.
    """
    if directory is None:
        return []
    is_run = (directory / SUMMARY).exists()
    places = [directory] if is_run else sorted(p.parent for p in directory.glob(f"*/{SUMMARY}"))
    runs = [Run(p.resolve().name, read_summary(p / SUMMARY), _metrics(p / METRICS)) for p in places]
    return sorted(runs, key=lambda r: (r.summary.embedding != "plain", r.summary.expanded, r.name))


def _metrics(path: Path) -> tuple[StepMetric, ...]:
    return tuple(read_metrics(path)) if path.exists() else ()


def speed_up(runs: Sequence[Run]) -> tuple[Run, Run] | None:
    """Return a deduplicated run and the expanded one that is otherwise the same, if there are."""
    for expanded in (r for r in runs if r.summary.expanded):
        for run in runs:
            if not run.summary.expanded and run.summary.embedding == expanded.summary.embedding:
                return run, expanded
    return None


def training_section(runs: Sequence[Run]) -> Section:
    """Return the section about training."""
    return Section(
        "training",
        "Training",
        _finding(runs),
        _speeds(runs) + _losses(runs) + _phases(runs) + _table(runs),
    )


def _finding(runs: Sequence[Run]) -> str:
    return " ".join([_speed_finding(runs), *_cache_findings(runs)])


def _cache_findings(runs: Sequence[Run]) -> list[str]:
    return [
        f"In run {r.name} the cache held {percent(r.summary.cache_hit_rate)} of the rows that "
        f"steps needed, at {count(r.summary.samples_per_sec)} samples per second."
        for r in runs
        if r.summary.cache_hit_rate is not None
    ]


def _speed_finding(runs: Sequence[Run]) -> str:
    pair = speed_up(runs)
    if pair is None:
        best = max(runs, key=lambda r: r.summary.samples_per_sec)
        return f"{best.name} trains {count(best.summary.samples_per_sec)} samples per second."
    fast, slow = pair
    a, b = fast.summary, slow.summary
    text = (
        f"With deduplication training runs at {count(a.samples_per_sec)} samples per second "
        f"instead of {count(b.samples_per_sec)}: {ratio(a.samples_per_sec, b.samples_per_sec)} "
        "times as fast on the same batches"
    )
    if a.ne is None or b.ne is None:
        return f"{text}; the last losses are {a.loss_last:.4f} and {b.loss_last:.4f}."
    worse = " Above 1 is worse than always predicting the mean rate." if a.ne > 1 else ""
    return f"{text}; normalised entropy on the held-back range is {a.ne:.4f} and {b.ne:.4f}.{worse}"


def _speeds(runs: Sequence[Run]) -> str:
    bars = [
        Bar(r.name, r.summary.samples_per_sec, count(r.summary.samples_per_sec), r.color)
        for r in runs
    ]
    label = "Samples per second: " + ", ".join(f"{b.name} {b.text}" for b in bars)
    return figure(
        bar_chart("speeds", label, bars),
        "Samples trained per second over all steps but the first.",
    )


def _losses(runs: Sequence[Run]) -> str:
    lines: list[Line] = []
    longest = max((len(r.metrics) for r in runs), default=0)
    span = max(1, longest // 25)
    curves = [(r, *_samples_and_loss(r)) for r in runs if r.metrics]
    if not curves:
        return paragraph("No run has step metrics, so there are no loss curves.", "note")
    lines.extend(Line("", x, y, r.color, faint=True) for r, x, y in curves)
    for place, (run, x, y) in enumerate(curves):
        # Runs on the same batches lie on each other: dashes let the one below show.
        dashes = () if place == 0 else (2.5, 1.5 + place)
        lines.append(Line(run.name, x, smoothed(y, np.diff(x, prepend=0), span), run.color, dashes))
    losses = np.concatenate([y for _, _, y in curves])
    high = float(np.quantile(losses, SHOWN_LOSSES)) * 1.1
    label = "Loss over samples trained: " + ", ".join(
        f"{r.name} from {r.summary.loss_first:.4f} to {r.summary.loss_last:.4f}" for r in runs
    )
    y = Scale("loss", lambda value: f"{value:g}", None, high)
    chart = curve_chart("losses", label, lines, Scale("samples trained"), y)
    return figure(
        chart,
        f"Loss of each step before its update, thin; its mean over {2 * span + 1} steps, "
        "weighted by samples, thick. Runs on the same batches that differ only in how tables are "
        "held or rows are repeated "
        f"have the same loss up to rounding, so their lines lie on each other.{_cut(losses, high)}",
    )


def _cut(losses: NDArray[np.float64], high: float) -> str:
    above = losses[losses > high]
    if not len(above):
        return ""
    return (
        f" {count(len(above))} of {count(len(losses))} steps lie above the axis, at most "
        f"{digits(above.max())}."
    )


def _samples_and_loss(run: Run) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    samples = np.cumsum([m.num_samples for m in run.metrics]).astype(np.float64)
    return samples, np.array([m.loss for m in run.metrics], np.float64)


def mean_phases(run: Run) -> Mapping[str, float]:
    """Return the mean milliseconds of each phase and of the rest, the first step left out.

    Phases that run beside each other may add up to more than the wall time; then nothing is left.
    """
    steps = run.metrics[1:] or run.metrics
    wall = float(np.mean([m.num_samples / m.samples_per_sec for m in steps]))
    phases = {p: float(np.mean([m.phases.get(p, 0.0) for m in steps])) for p in PHASES}
    phases[REST] = max(0.0, wall - sum(phases.values()))
    return {name: 1000 * seconds for name, seconds in phases.items()}


def _phases(runs: Sequence[Run]) -> str:
    rows = {r.name: mean_phases(r) for r in runs if r.metrics}
    if not rows:
        return ""
    texts = {name: f"{digits(sum(phases.values()))} ms" for name, phases in rows.items()}
    label = "Milliseconds per step by phase: " + "; ".join(
        f"{name}: " + ", ".join(f"{p} {digits(v)}" for p, v in phases.items())
        for name, phases in rows.items()
    )
    return figure(
        stacked_bars("phases", label, rows, texts),
        "Mean milliseconds of a step by phase, the first step left out.",
    )


def _table(runs: Sequence[Run]) -> str:
    head = [
        "run", "embedding", "samples", "steps", "samples/s", "last loss", "NE", "AUC", "GAUC",
        "hit rate", "fetched rows", "peak memory",
    ]  # fmt: skip
    rows = []
    for run in runs:
        s = run.summary
        rows.append(
            (
                run.name, s.embedding + (", expanded" if s.expanded else ""), count(s.num_samples),
                count(s.num_steps), count(s.samples_per_sec), f"{s.loss_last:.4f}",
                *(None if v is None else f"{v:.4f}" for v in (s.ne, s.auc, s.gauc)),
                None if s.cache_hit_rate is None else percent(s.cache_hit_rate),
                count(s.fetched_rows), size(s.peak_rss_bytes),
            )
        )  # fmt: skip
    return table(
        "Runs; NE (normalised entropy, lower is better), AUC and GAUC on the held-back range",
        head, rows,
    )  # fmt: skip
