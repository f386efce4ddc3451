"""The status page: one HTML document without external resources, from the template `page.html`.

A chart is SVG with a text alternative (`aria-label`), a table beside it with the same numbers, and
marks that differ in shape, not only in colour.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from html import escape
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from presage.scheduler.controller.journal import Incident, Kind, Speed, SpeedPool, Usage
from presage.scheduler.controller.predictions import LOOKAHEAD_SEC
from presage.scheduler.controller.slots import NUM_RANGES, format_spans
from presage.scheduler.model.pools import counted
from presage.scheduler.status.view import (
    JobView,
    View,
    clock,
    describe_move,
    duration,
    memory,
    notes_of,
    percent,
    three_digits,
)
from presage.schemas.errors import printable
from presage.schemas.hashing import NUM_SLOTS

POOL_LABELS = {
    "segment": "segment jobs",
    "coordinator": "coordinator",
    "replica": "replicas",
    "store": "stores",
}
UNITS: dict[SpeedPool, tuple[str, str]] = {
    "preprocessing": ("Speed of one segment job", "rows/s"),
    "training": ("Speed of training", "samples/s"),
}
NUM_LATEST = 12
"""Rows of the table beside a chart."""
NUM_TONES = 4
"""Cell styles; consecutive stores differ."""


def page(view: View) -> str:
    """Return the document."""
    return _TEMPLATE.render(view=view, headline=headline(view), tiles=_tiles(view))


def headline(view: View) -> str:
    """Return the status in one line."""
    phases = [job.phase for job in view.jobs]
    if not phases:
        return "no job yet"
    counts = ", ".join(f"{phases.count(phase)} {phase}" for phase in dict.fromkeys(phases))
    line = f"{counted(len(phases), 'job')}: {counts}"
    missing = sum(map(view.is_open, view.incidents))
    return f"{line}; {counted(missing, 'replacement')} pending" if missing else line


def _tiles(view: View) -> tuple[tuple[str, str, str], ...]:
    forecasts = [job.forecast for job in view.jobs if job.forecast is not None]
    spent = sum(job.spent for job in view.jobs)
    total = spent + sum(forecast.left_cost for forecast in forecasts)
    left_sec = max((forecast.left_sec for forecast in forecasts), default=None)
    num_incidents = sum(n for _, _, n in view.num_incidents)
    num_replaced = sum(i.back_sec is not None for i in view.incidents)
    return (
        ("Cores reserved", three_digits(view.used_cpus), f"of {three_digits(view.cpus)}"),
        ("Memory reserved", memory(view.used_memory_bytes), f"of {memory(view.memory_bytes)}"),
        ("Cost so far", three_digits(spent), f"{three_digits(total)} predicted in all"),
        (
            "Time left",
            "none" if left_sec is None else duration(left_sec),
            f"{duration(view.now_sec - view.begun_sec)} since the start",
        ),
        ("Incidents", f"{num_incidents:,}", f"{num_replaced:,} replaced"),
    )


def job_facts(job: JobView, now_sec: float) -> list[str]:
    """Return cost, time, forecast and deadline of a job, and why nothing happens, in words."""
    elapsed = (now_sec if job.ended_sec is None else job.ended_sec) - job.since_sec
    hourly = f", {three_digits(job.hour_price)} an hour as reserved now" if job.hour_price else ""
    facts = [
        f"cost so far {three_digits(job.spent)}{hourly}",
        f"{'running for' if job.ended_sec is None else 'ran'} {duration(elapsed)}",
    ]
    forecast = job.forecast
    if forecast is not None:
        total = job.spent + forecast.left_cost
        facts += [
            f"predicted: {duration(forecast.left_sec)} more, cost {three_digits(total)} in all",
            f"step times {percent(forecast.low)} to {percent(forecast.high)} of the prediction "
            f"({'narrow enough' if forecast.confident else 'too wide'} to act upon)",
        ]
    if job.deadline_sec is not None:
        late = elapsed + (forecast.left_sec if forecast else 0.0) - job.deadline_sec
        facts.append(
            f"deadline after {duration(job.deadline_sec)}: "
            + (f"late by {duration(late)}" if late > 0 else f"{duration(-late)} to spare")
        )
    return [*facts, *notes_of(job)]


def describe_speed(speed: Speed, unit: str) -> str:
    """Return a measurement beside its prediction, in words."""
    error = speed.measured / speed.predicted - 1.0
    comparison = f"{percent(abs(error))} {'more' if error > 0 else 'less'} than predicted before"
    if abs(error) < 0.005:
        comparison = "as predicted before"
    predicted = three_digits(speed.predicted)
    return f"Measured {three_digits(speed.measured)} {unit}, {comparison} ({predicted})."


def _isoformat(time_sec: float) -> str:
    return f"{datetime.fromtimestamp(time_sec, UTC):%Y-%m-%dT%H:%M:%SZ}"


# Charts.

WIDTH, HEIGHT = 520.0, 190.0
LEFT, RIGHT, TOP, BOTTOM = 52.0, 12.0, 12.0, 26.0
LABEL_GAP = 8.0
MARKS: dict[Kind, str] = {
    "lost": "M-5-5L5 5M-5 5L5-5",
    "failed": "M-5-5H5V5H-5Z",
    "slow": "M-6-5H6L0 6Z",
    "preempted": "M0-6L6 0L0 6L-6 0Z",
    "memory": "M-6 5H6L0-6Z",
}
"""SVG paths of the marks of incidents."""
KIND_LABELS: dict[Kind, str] = {
    "lost": "lost",
    "failed": "failed",
    "slow": "too slow",
    "preempted": "preempted",
    "memory": "out of memory",
}


@dataclass(frozen=True, slots=True)
class Frame:
    """Coordinates of a chart."""

    start_sec: float
    end_sec: float
    top: float

    def x(self, time_sec: float) -> float:
        """Return the horizontal coordinate of a time."""
        span = max(self.end_sec - self.start_sec, 1e-9)
        return LEFT + (WIDTH - LEFT - RIGHT) * (time_sec - self.start_sec) / span

    def y(self, value: float) -> float:
        """Return the vertical coordinate of a value, clipped to the frame."""
        share = min(max(value / max(self.top, 1e-9), 0.0), 1.0)
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * share

    def axes(self, unit: str) -> str:
        """Return grid lines with values, and the time range."""
        lines: list[str] = []
        for value in ticks(self.top):
            y = self.y(value)
            lines.append(f'<path class="grid" d="M{LEFT:.0f} {y:.1f}H{WIDTH - RIGHT:.0f}"/>')
            lines.append(_text(LEFT - LABEL_GAP, y + 4, three_digits(value), "end"))
        bottom = HEIGHT - 7
        lines.append(_text(LEFT, bottom, clock(self.start_sec), "start"))
        lines.append(_text(WIDTH - RIGHT, bottom, clock(self.end_sec), "end"))
        lines.append(_text((LEFT + WIDTH - RIGHT) / 2, bottom, unit, "middle"))
        return "".join(lines)


def ticks(top: float) -> list[float]:
    """Return three to six round values, starting at 0.

    Example:
        >>> ticks(4.2), ticks(130)
        ([0.0, 1.0, 2.0, 3.0, 4.0], [0.0, 50.0, 100.0])
    """
    step = 10.0 ** math.floor(math.log10(max(top, 1e-9)))
    step *= next(f for f in (0.2, 0.5, 1.0, 2.0) if top / (step * f) <= 5.0)
    return [step * i for i in range(int(top / step + 1e-9) + 1)]


def speed_chart(speeds: Sequence[Speed], title: str, unit: str, until_sec: float) -> Markup:
    """Return a chart of measured speeds over predicted ones and their interval."""
    last = speeds[-1]
    # Predictions far above the measurements are clipped.
    measured_max, predicted_max = max(s.measured for s in speeds), max(s.predicted for s in speeds)
    top = 1.15 * max(measured_max, min(predicted_max, 2.0 * measured_max))
    frame = Frame(speeds[0].time_sec, max(until_sec, last.time_sec), top)
    # A single point becomes a short line.
    points = [*speeds, last] if len(speeds) == 1 else list(speeds)
    xs = [frame.x(s.time_sec) for s in points]
    if len(speeds) == 1:
        xs[1] = min(xs[0] + 14.0, WIDTH - RIGHT)
    upper = [f"{x:.1f} {frame.y(s.high):.1f}" for x, s in zip(xs, points, strict=True)]
    lower = [f"{x:.1f} {frame.y(s.low):.1f}" for x, s in zip(xs, points, strict=True)]
    predicted = [f"{x:.1f} {frame.y(s.predicted):.1f}" for x, s in zip(xs, points, strict=True)]
    measured = [f"{x:.1f} {frame.y(s.measured):.1f}" for x, s in zip(xs, points, strict=True)]
    dots = "".join(
        f'<circle class="measured" cx="{frame.x(s.time_sec):.1f}" cy="{frame.y(s.measured):.1f}" '
        'r="2.6"/>'
        for s in speeds[-60:]
    )
    body = (
        frame.axes(unit)
        + f'<path class="band" d="M{"L".join([*upper, *reversed(lower)])}Z"/>'
        + f'<path class="predicted" d="M{"L".join(predicted)}"/>'
        + f'<path class="measured" d="M{"L".join(measured)}"/>'
        + dots
    )
    label = (
        f"{title}: last measured {three_digits(last.measured)} {unit}, predicted before "
        f"{three_digits(last.predicted)}, between {three_digits(last.low)} and "
        f"{three_digits(last.high)}; "
        f"{len(speeds)} measurements from {clock(speeds[0].time_sec)} to {clock(last.time_sec)}"
    )
    return _picture(label, body)


def usage_chart(usage: Sequence[Usage], cpus: float, until_sec: float) -> Markup:
    """Return a chart of reserved cores under the budget."""
    frame = Frame(usage[0].time_sec, until_sec, 1.1 * max(cpus, *(u.cpus for u in usage)))
    steps = f"M{frame.x(usage[0].time_sec):.1f} {frame.y(usage[0].cpus):.1f}" + "".join(
        f"H{frame.x(u.time_sec):.1f}V{frame.y(u.cpus):.1f}" for u in usage[1:]
    )
    end, base = frame.x(until_sec), frame.y(0.0)
    body = (
        frame.axes("cores")
        + f'<path class="area" d="{steps}H{end:.1f}V{base:.1f}H{LEFT:.1f}Z"/>'
        + f'<path class="measured" d="{steps}H{end:.1f}"/>'
        + f'<path class="predicted" d="M{LEFT:.1f} {frame.y(cpus):.1f}H{end:.1f}"/>'
    )
    most = max(u.cpus for u in usage)
    label = (
        f"Reserved cores: {three_digits(usage[-1].cpus)} of {three_digits(cpus)} now, "
        f"{three_digits(most)} at most, from {clock(usage[0].time_sec)} to {clock(until_sec)}"
    )
    return _picture(label, body)


def incident_chart(
    incidents: Sequence[Incident], jobs: Sequence[str], start_sec: float, end_sec: float
) -> Markup:
    """Return a timeline per job with its incidents and the time until replacement."""
    frame, row = Frame(start_sec, end_sec, 1.0), 30.0
    height = row * len(jobs) + BOTTOM + 6
    parts: list[str] = []
    for index, job in enumerate(jobs):
        y = row * index + row / 2 + 4
        parts.append(f'<path class="grid" d="M{LEFT:.0f} {y:.1f}H{WIDTH - RIGHT:.0f}"/>')
        parts.append(_text(LEFT - LABEL_GAP, y + 4, f"{index + 1}", "end"))
        for incident in (i for i in incidents if i.job == job):
            x, mark = frame.x(incident.time_sec), MARKS[incident.kind]
            if incident.back_sec is not None:
                back = max(frame.x(incident.back_sec), x + 1)
                parts.append(f'<path class="gap" d="M{x:.1f} {y:.1f}H{back:.1f}"/>')
            shape = f'<path class="mark {incident.kind}" d="{mark}"/>'
            parts.append(f'<g transform="translate({x:.1f} {y:.1f})">{shape}</g>')
    parts.append(_text(LEFT, height - 7, clock(start_sec), "start"))
    parts.append(_text(WIDTH - RIGHT, height - 7, clock(end_sec), "end"))
    delays = [i.back_sec - i.time_sec for i in incidents if i.back_sec is not None]
    longest = f"; replaced after {duration(max(delays))} at most" if delays else ""
    label = f"Timeline of {len(jobs)} jobs with {len(incidents)} incidents{longest}"
    return _picture(label, "".join(parts), height)


def mark(kind: Kind) -> Markup:
    """Return the mark of a kind, for the legend."""
    shape = f'<path class="mark {kind}" d="{MARKS[kind]}"/>'
    return Markup(f'<svg class="key" viewBox="-9 -9 18 18" aria-hidden="true">{shape}</svg>')


def _text(x: float, y: float, content: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(content)}</text>'


def _picture(label: str, body: str, height: float = HEIGHT) -> Markup:
    return Markup(
        f'<svg class="chart" role="img" viewBox="0 0 {WIDTH:.0f} {height:.0f}" '
        f'aria-label="{escape(label)}">{body}</svg>'
    )


# The template: variables, functions and filters; all values are escaped.

_ENVIRONMENT = Environment(
    loader=FileSystemLoader(Path(__file__).parent),
    autoescape=True,
    trim_blocks=True,
    undefined=StrictUndefined,
)
_ENVIRONMENT.filters |= {
    "clock": clock,
    "describe_move": describe_move,
    "three_digits": three_digits,
    "duration": duration,
    "format_spans": format_spans,
    "isoformat": _isoformat,
    "memory": memory,
    "percent": percent,
    "printable": printable,
}
_TEMPLATE = _ENVIRONMENT.get_template(
    "page.html",
    globals={
        "KIND_LABELS": KIND_LABELS,
        "LOOKAHEAD": f"{LOOKAHEAD_SEC:.0f}",
        "NUM_LATEST": NUM_LATEST,
        "NUM_RANGES": NUM_RANGES,
        "NUM_SLOTS": NUM_SLOTS,
        "NUM_TONES": NUM_TONES,
        "POOL_LABELS": POOL_LABELS,
        "UNITS": UNITS,
        "counted": counted,
        "describe_speed": describe_speed,
        "incident_chart": incident_chart,
        "job_facts": job_facts,
        "mark": mark,
        "speed_chart": speed_chart,
        "usage_chart": usage_chart,
    },
)
