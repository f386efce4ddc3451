"""Tables and charts of the status page."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from scheduler.status.journal import Incident, Kind, Speed, Usage
from scheduler.status.view import ProcessView, clock, digits, duration, moment, visible


def text(value: object) -> str:
    """Return what a log says as text of the page, its direction kept to itself."""
    return f"<bdi>{escape(visible(str(value)))}</bdi>"


def table(caption: str, head: Sequence[str], rows: Iterable[Sequence[str]], key: str) -> str:
    """Return a table that scrolls in itself and is reached by keyboard.

    Args:
        caption: what it shows.
        head: one text per column.
        rows: cells as HTML; the first names the row.
        key: id of the table.
    """
    columns = "".join(f'<th scope="col">{escape(name)}</th>' for name in head)
    body = "".join(
        f'<tr><th scope="row">{first}</th>{"".join(f"<td>{cell}</td>" for cell in rest)}</tr>'
        for first, *rest in rows
    )
    return (
        f'<div class="scroll" id="{key}" role="region" aria-labelledby="{key}-caption" '
        f'tabindex="0"><table><caption id="{key}-caption">{escape(caption)}</caption>'
        f"<thead><tr>{columns}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def timed(time_sec: float) -> str:
    """Return a moment as the time of day."""
    return f'<time datetime="{moment(time_sec)}">{clock(time_sec)}</time>'


def cores(one: ProcessView) -> str:
    """Return the cores that a process kept busy of those that are booked for it."""
    booked = digits(one.cpus)
    return booked if one.busy_cores is None else f"{digits(round(one.busy_cores, 2))} of {booked}"


def details(title: str, body: str) -> str:
    """Return what is closed until somebody opens it."""
    return f"<details><summary>{escape(title)}</summary>{body}</details>"


# Charts as SVG inside the page: colours of its style sheet, each line with a shape of its own.
#
# A chart is a picture with a name and a text that says the same (`aria-label`); the numbers stand
# in a table beside it.

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
"""Shapes of what went wrong; no two look alike without their colour."""
KIND_WORDS: dict[Kind, str] = {
    "lost": "lost",
    "failed": "failed",
    "slow": "too slow",
    "preempted": "taken away",
    "memory": "short of memory",
}


@dataclass(frozen=True, slots=True)
class Frame:
    """Where times and values lie in a chart."""

    start_sec: float
    end_sec: float
    top: float

    def x(self, time_sec: float) -> float:
        """Return the place of a time."""
        span = max(self.end_sec - self.start_sec, 1e-9)
        return LEFT + (WIDTH - LEFT - RIGHT) * (time_sec - self.start_sec) / span

    def y(self, value: float) -> float:
        """Return the place of a value; what is above the frame lies at its edge."""
        share = min(max(value / max(self.top, 1e-9), 0.0), 1.0)
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * share

    def axes(self, unit: str) -> str:
        """Return lines at a few values, and both ends of the time."""
        lines: list[str] = []
        for value in ticks(self.top):
            y = self.y(value)
            lines.append(f'<path class="grid" d="M{LEFT:.0f} {y:.1f}H{WIDTH - RIGHT:.0f}"/>')
            lines.append(_text(LEFT - LABEL_GAP, y + 4, digits(value), "end"))
        bottom = HEIGHT - 7
        lines.append(_text(LEFT, bottom, clock(self.start_sec), "start"))
        lines.append(_text(WIDTH - RIGHT, bottom, clock(self.end_sec), "end"))
        lines.append(_text((LEFT + WIDTH - RIGHT) / 2, bottom, unit, "middle"))
        return "".join(lines)


def ticks(top: float) -> list[float]:
    """Return three to six round values from 0 on.

    Example:
        >>> ticks(4.2), ticks(130)
        ([0.0, 1.0, 2.0, 3.0, 4.0], [0.0, 50.0, 100.0])
    """
    step = 10.0 ** math.floor(math.log10(max(top, 1e-9)))
    step *= next(f for f in (0.2, 0.5, 1.0, 2.0) if top / (step * f) <= 5.0)
    return [step * i for i in range(int(top / step + 1e-9) + 1)]


def speed_chart(speeds: Sequence[Speed], title: str, unit: str, until_sec: float) -> str:
    """Return measured speeds as dots on a line, over the band and the dashes of the prediction.

    Args:
        speeds: of one pool, oldest first; at least one.
        title: of the chart.
        unit: of the values.
        until_sec: right end.
    """
    last = speeds[-1]
    # A first guess that is far off must not press all that was measured to the ground.
    most, guess = max(s.measured for s in speeds), max(s.predicted for s in speeds)
    top = 1.15 * max(most, min(guess, 2.0 * most))
    frame = Frame(speeds[0].time_sec, max(until_sec, last.time_sec), top)
    # A single point is a short line, so that it is seen.
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
    said = (
        f"{title}: last measured {digits(last.measured)} {unit}, predicted before "
        f"{digits(last.predicted)}, between {digits(last.low)} and {digits(last.high)}; "
        f"{len(speeds)} measurements from {clock(speeds[0].time_sec)} to {clock(last.time_sec)}"
    )
    return _picture(said, body)


def usage_chart(usage: Sequence[Usage], cpus: float, until_sec: float) -> str:
    """Return booked cores as steps under the line of the budget.

    Args:
        usage: changes, oldest first; at least one.
        cpus: of the budget.
        until_sec: right end.
    """
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
    said = (
        f"Cores booked: {digits(usage[-1].cpus)} of {digits(cpus)} now, {digits(most)} at most, "
        f"from {clock(usage[0].time_sec)} to {clock(until_sec)}"
    )
    return _picture(said, body)


def incident_chart(
    incidents: Sequence[Incident], jobs: Sequence[str], start_sec: float, end_sec: float
) -> str:
    """Return a line of time for each job, with what went wrong and when something took over.

    Args:
        incidents: newest first.
        jobs: names, in order.
        start_sec: left end.
        end_sec: right end.
    """
    frame, row = Frame(start_sec, end_sec, 1.0), 30.0
    height = row * len(jobs) + BOTTOM + 6
    parts: list[str] = []
    for place, job in enumerate(jobs):
        y = row * place + row / 2 + 4
        parts.append(f'<path class="grid" d="M{LEFT:.0f} {y:.1f}H{WIDTH - RIGHT:.0f}"/>')
        parts.append(_text(LEFT - LABEL_GAP, y + 4, f"{place + 1}", "end"))
        for one in (i for i in incidents if i.job == job):
            x, mark = frame.x(one.time_sec), MARKS[one.kind]
            if one.back_sec is not None:
                back = max(frame.x(one.back_sec), x + 1)
                parts.append(f'<path class="gap" d="M{x:.1f} {y:.1f}H{back:.1f}"/>')
            shape = f'<path class="mark {one.kind}" d="{mark}"/>'
            parts.append(f'<g transform="translate({x:.1f} {y:.1f})">{shape}</g>')
    parts.append(_text(LEFT, height - 7, clock(start_sec), "start"))
    parts.append(_text(WIDTH - RIGHT, height - 7, clock(end_sec), "end"))
    slow = [i.back_sec - i.time_sec for i in incidents if i.back_sec is not None]
    longest = f"; replaced after {duration(max(slow))} at most" if slow else ""
    said = f"Line of time of {len(jobs)} jobs with {len(incidents)} incidents{longest}"
    return _picture(said, "".join(parts), height)


def mark(kind: Kind) -> str:
    """Return the shape of a kind, for a legend."""
    shape = f'<path class="mark {kind}" d="{MARKS[kind]}"/>'
    return f'<svg class="key" viewBox="-9 -9 18 18" aria-hidden="true">{shape}</svg>'


def meter(share: float, label: str, *, is_limit: bool = False) -> str:
    """Return a bar with its value in words beside it.

    Args:
        share: 0 to 1; more is shown as full.
        label: value and bound in words.
        is_limit: whether to come near the bound is bad.
    """
    kind = " over" if share > 1.0 else " near" if share > 0.9 else ""
    kind = kind if is_limit else ""
    width = 100 * min(max(share, 0.0), 1.0)
    return (
        f'<span class="meter{kind}"><svg viewBox="0 0 100 8" preserveAspectRatio="none" '
        f'aria-hidden="true"><rect class="rail" width="100" height="8"/>'
        f'<rect class="fill" width="{width:.1f}" height="8"/></svg>'
        f"<span>{html.escape(label)}</span></span>"
    )


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{html.escape(text)}</text>'


def _picture(said: str, body: str, height: float = HEIGHT) -> str:
    return (
        f'<svg class="chart" role="img" viewBox="0 0 {WIDTH:.0f} {height:.0f}" '
        f'aria-label="{html.escape(said)}">{body}</svg>'
    )
