"""The status page: one HTML document."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from string import Template

from scheduler.controller.slots import NUM_RANGES, format_spans
from scheduler.controller.watch import LOOKAHEAD_SEC
from scheduler.planner.policy import counted
from scheduler.status.html import (
    KIND_WORDS,
    cores,
    details,
    incident_chart,
    mark,
    meter,
    speed_chart,
    table,
    text,
    timed,
    usage_chart,
)
from scheduler.status.journal import Incident, SpeedPool
from scheduler.status.view import (
    JobView,
    Move,
    PoolView,
    ProcessView,
    Stores,
    StoreView,
    View,
    digits,
    duration,
    in_words,
    memory,
    percent,
)
from schemas.hashing import NUM_SLOTS

TONES = 4
"""Looks of cells; stores that follow each other have different ones, and each cell says its own."""
UNKNOWN = "not known yet"


def stores_section(stores: Stores, key: str) -> str:
    """Return who holds a job's rows, as a part of the job's own section.

    Args:
        stores: of the job.
        key: id of the job's section.
    """
    key = f"{key}-stores"
    ahead = f"accesses in {LOOKAHEAD_SEC:.0f} s"
    head = ("store", "process", "state", "ranges", "accesses now", ahead, "memory", "cores")
    rows = map(_row, stores.stores)
    return (
        f'<section id="{key}" class="stores" aria-labelledby="{key}-title">'
        f'<h3 id="{key}-title">Stores</h3>'
        f"{_cells(stores)}{table('Stores and their ranges', head, rows, f'{key}-table')}"
        f'<p class="soft">{escape(_explained(stores))}</p></section>'
    )


def _cells(stores: Stores) -> str:
    """Return a cell for each range that says whose it is, and what moves in words."""
    if not stores.owners:
        return "<p>No range has a store yet.</p>"
    places = {store.number: place for place, store in enumerate(stores.stores)}
    cells = "".join(
        _cell(number, owner, places[owner] % TONES, stores.move)
        for number, owner in enumerate(stores.owners)
    )
    return (
        f"<p>{escape(_moving(stores.move))}</p>"
        f'<ol class="ranges" role="list" aria-label="Store of each range">{cells}</ol>'
        '<p class="soft">Large: the store; small: the range of slots that it owns.</p>'
    )


def _cell(number: int, owner: int, tone: int, move: Move | None) -> str:
    named = f"<span>{_unseen('range ')}{number}{_unseen(': ')}</span>"
    if move is None or number not in move.ranges:
        return f'<li class="tone-{tone}">{named}<strong>{_unseen("store ")}{owner}</strong></li>'
    target = "" if move.target is None else f"<span> to {move.target}</span>"
    return (
        f'<li class="tone-{tone} moves">{named}'
        f"<strong>{_unseen('moving from ')}{owner}</strong>{target}</li>"
    )


def _unseen(said: str) -> str:
    return f'<span class="unseen">{said}</span>'


def _moving(move: Move | None) -> str:
    if move is None:
        return "No range is moving."
    return f"{in_words(move).capitalize()}."


def _row(store: StoreView) -> tuple[str, ...]:
    one = store.process
    ranges = escape(format_spans(store.ranges))
    shares = _share(store.share), _share(store.share_ahead)
    if one is None:
        return str(store.number), "none", "no process", ranges, *shares, "none", "none"
    held = "not read yet" if one.resident_bytes is None else memory(one.resident_bytes)
    limit = f" of {memory(one.limit_bytes)}" if one.limit_bytes else ""
    own = text(one.name), one.status, ranges, *shares, escape(f"{held}{limit}"), cores(one)
    return str(store.number), *own


def _share(share: float | None) -> str:
    return UNKNOWN if share is None else meter(share, percent(share))


def _explained(stores: Stores) -> str:
    told = (
        f"A row lies in one of {NUM_SLOTS:,} slots, and these in {NUM_RANGES} ranges, which move "
        "as a whole."
    )
    if stores.step is None:
        return told
    told += f" Accesses are those that the oracle knows of, around step {stores.step:,}"
    if stores.step_ahead is None:
        return f"{told}."
    return f"{told} now and around step {stores.step_ahead:,} then."


# The status page: one document without anything from elsewhere.
#
# Sections have ids and rows have keys, so that what is shown can be brought up to date in its
# place (`status.js`), with focus, selection and position kept.

TEMPLATE = Template(Path(__file__).with_name("page.html").read_text(encoding="utf-8"))
POOL_WORDS = {
    "segment": "segment jobs",
    "lead": "lead trainer",
    "replica": "replicas",
    "store": "stores",
}
UNITS: dict[SpeedPool, tuple[str, str]] = {
    "preprocessing": ("Speed of one segment job", "rows/s"),
    "training": ("Speed of training", "samples/s"),
}
LATEST = 12
"""Measurements that the table beside a chart lists."""


def page(view: View) -> str:
    """Return the document."""
    return TEMPLATE.substitute(
        title=escape(headline(view)),
        headline=escape(headline(view)),
        now=timed(view.now_sec),
        events=escape(counted(view.num_events, "event")),
        tiles=_tiles(view),
        links=_links(view.jobs),
        budget=_budget(view),
        jobs="\n".join(_job(number, job, view) for number, job in enumerate(view.jobs, 1)),
        incidents=_incidents(view),
        decisions=_decisions(view),
    )


def headline(view: View) -> str:
    """Return how things stand in one line."""
    phases = [job.phase for job in view.jobs]
    if not phases:
        return "no job yet"
    each = ", ".join(f"{phases.count(phase)} {phase}" for phase in dict.fromkeys(phases))
    told = f"{counted(len(phases), 'job')}: {each}"
    missing = sum(map(view.is_open, view.incidents))
    gone = f"; {missing} process{'es' if missing > 1 else ''} to be replaced" if missing else ""
    return f"{told}{gone}"


def _tiles(view: View) -> str:
    left = [job.forecast for job in view.jobs if job.forecast is not None]
    spent = sum(job.spent for job in view.jobs)
    total = spent + sum(found.left_cost for found in left)
    ends = max((found.left_sec for found in left), default=None)
    count = sum(n for _, _, n in view.num_incidents)
    back = sum(i.back_sec is not None for i in view.incidents)
    tiles = (
        ("Cores booked", digits(view.used_cpus), f"of {digits(view.cpus)}"),
        ("Memory booked", memory(view.used_memory_bytes), f"of {memory(view.memory_bytes)}"),
        ("Cost so far", digits(spent), f"{digits(total)} predicted in all"),
        (
            "Time left",
            "none" if ends is None else duration(ends),
            f"{duration(view.now_sec - view.begun_sec)} since it began",
        ),
        ("Incidents", f"{count:,}", f"{back:,} replaced"),
    )
    cells = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd><dd>{escape(more)}</dd></div>"
        for name, value, more in tiles
    )
    return f'<dl class="tiles">{cells}</dl>'


def _links(jobs: Sequence[JobView]) -> str:
    return "".join(
        f'<li><a href="#job-{number}">Job {text(job.name)}</a></li>'
        for number, job in enumerate(jobs, 1)
    )


def _budget(view: View) -> str:
    meters = (
        f"<p>{meter(view.used_cpus / max(view.cpus, 1e-9), _of(view.used_cpus, view.cpus))}</p>"
        "<p>"
        + meter(
            view.used_memory_bytes / max(view.memory_bytes, 1),
            f"{memory(view.used_memory_bytes)} of {memory(view.memory_bytes)} of memory booked",
        )
        + "</p>"
    )
    if not view.usage or view.now_sec <= view.usage[0].time_sec:
        return meters
    chart = usage_chart(view.usage, view.cpus, view.now_sec)
    rows = [(timed(u.time_sec), digits(u.cpus), memory(u.memory_bytes)) for u in view.usage]
    head = ("from", "cores", "memory")
    return (
        f"{meters}<figure>{chart}<figcaption>Cores booked over time (solid) under the budget "
        f"(dashed).</figcaption></figure>"
        + details("Changes as a table", table("Latest changes", head, rows[-LATEST:], "usage"))
    )


def _of(used: float, whole: float) -> str:
    return f"{digits(used)} of {digits(whole)} cores booked"


def _job(number: int, job: JobView, view: View) -> str:
    key = f"job-{number}"
    processes = [(pool, one) for pool in job.pools for one in pool.processes]
    parts = [
        f"<p>{text(job.last_reason)}</p>" if job.last_reason else "",
        _progress(job),
        _prices(job, view),
        table("Pools", ("pool", "wanted", "running", "starting", "leaving", "cores", "memory"),
              map(_pool_row, job.pools), f"{key}-pools") if job.pools else "",
        stores_section(job.stores, key) if job.stores else "",
        '<div class="pair">',
        *(_speed(job, pool, key, view.now_sec) for pool in UNITS),
        "</div>",
        table("Processes: memory against limit", ("process", "status", "since", "cores", "memory"),
              (_process_row(pool, one) for pool, one in processes), f"{key}-processes")
        if processes else "",
    ]  # fmt: skip
    return (
        f'<section id="{key}" aria-labelledby="{key}-title">'
        f'<h2 id="{key}-title">Job {number}: {text(job.name)} '
        f'<span class="phase {job.phase}">{job.phase}</span></h2>{"".join(parts)}</section>'
    )


def _progress(job: JobView) -> str:
    segments = f"{job.segments_built} of {counted(job.num_segments, 'segment')} built"
    trained = f"{job.num_trained:,} of {job.num_to_train:,} samples trained"
    steps = counted(job.next_step, "step")
    return (
        f"<p>{meter(job.segments_built / max(job.num_segments, 1), segments)}</p>"
        f"<p>{meter(job.num_trained / max(job.num_to_train, 1), f'{trained}, {steps}')}</p>"
    )


def _prices(job: JobView, view: View) -> str:
    taken = (view.now_sec if job.ended_sec is None else job.ended_sec) - job.since_sec
    hourly = f", {digits(job.hour_price)} an hour at what is booked now" if job.hour_price else ""
    told = [
        f"cost so far {digits(job.spent)}{hourly}",
        f"runs for {duration(taken)}" if job.ended_sec is None else f"ran {duration(taken)}",
    ]
    found = job.forecast
    if found is not None:
        total = job.spent + found.left_cost
        told += [
            f"predicted: {duration(found.left_sec)} more, cost {digits(total)} in all",
            f"step times {percent(found.low)} to {percent(found.high)} of the predicted ones "
            f"({'narrow enough' if found.confident else 'too wide'} to act upon)",
        ]
    if job.deadline_sec is not None:
        late = taken + (found.left_sec if found else 0.0) - job.deadline_sec
        told.append(
            f"deadline after {duration(job.deadline_sec)}: "
            + (f"late by {duration(late)}" if late > 0 else f"{duration(-late)} to spare")
        )
    return f'<ul class="facts">{"".join(f"<li>{escape(line)}</li>" for line in told)}</ul>'


def _pool_row(pool: PoolView) -> tuple[str, ...]:
    return (
        escape(POOL_WORDS[pool.name]),
        str(pool.wanted),
        *(str(pool.count(status)) for status in ("running", "starting", "leaving")),
        digits(sum(one.cpus for one in pool.processes)),
        memory(sum(one.limit_bytes for one in pool.processes)),
    )


def _process_row(pool: PoolView, one: ProcessView) -> tuple[str, ...]:
    held = "not read yet" if one.resident_bytes is None else memory(one.resident_bytes)
    cell = escape(held)
    if one.limit_bytes and one.resident_bytes is not None:
        share = one.resident_bytes / one.limit_bytes
        label = f"{held} of {memory(one.limit_bytes)} ({percent(share)})"
        cell = meter(share, label, is_limit=True)
    elif one.limit_bytes:
        cell = escape(f"{held}, limit {memory(one.limit_bytes)}")
    return text(one.name), one.status, timed(one.since_sec), cores(one), cell


def _speed(job: JobView, pool: SpeedPool, key: str, now_sec: float) -> str:
    speeds = [speed for speed in job.speeds if speed.pool == pool]
    title, unit = UNITS[pool]
    if not speeds:
        return f"<div><h3>{title}</h3><p>Nothing was measured yet.</p></div>"
    last = speeds[-1]
    off = last.measured / last.predicted - 1.0
    than = f"{percent(abs(off))} {'more' if off > 0 else 'less'} than predicted before"
    than = "as predicted before" if abs(off) < 0.005 else than
    told = f"Measured {digits(last.measured)} {unit}, {than} ({digits(last.predicted)})."
    end_sec = now_sec if job.ended_sec is None else job.ended_sec
    rows = [
        (timed(s.time_sec), str(s.num_processes), digits(s.measured), digits(s.predicted),
         f"{digits(s.low)} to {digits(s.high)}")
        for s in reversed(speeds[-LATEST:])
    ]  # fmt: skip
    head = ("at", "processes", "measured", "predicted", "90 % interval")
    listed = table(f"{title}, {unit}", head, rows, f"{key}-{pool}")
    return (
        f"<div><h3>{title}</h3><p>{escape(told)}</p>"
        f"<figure>{speed_chart(speeds, title, unit, end_sec)}<figcaption>Measured (line with "
        "dots), predicted before each measurement (dashed) and its 90 % interval (band)."
        f"</figcaption></figure>{details('Measurements as a table', listed)}</div>"
    )


def _incidents(view: View) -> str:
    if not view.incidents:
        return "<p>Nothing went wrong.</p>"
    jobs = [job.name for job in view.jobs]
    chart = incident_chart(view.incidents, jobs, view.begun_sec, view.now_sec)
    keys = "".join(
        f"<li>{mark(kind)} {escape(word)}</li>"
        for kind, word in KIND_WORDS.items()
        if any(i.kind == kind for i in view.incidents)
    )
    names = "; ".join(f"{number}: {text(name)}" for number, name in enumerate(jobs, 1))
    rows = (
        (timed(i.time_sec), text(i.job), text(i.process), KIND_WORDS[i.kind], text(i.detail),
         _back(i, view))
        for i in view.incidents
    )  # fmt: skip
    head = ("at", "job", "process", "what", "why", "replaced")
    return (
        f'<ul class="keys">{keys}</ul><figure>{chart}<figcaption>Rows are jobs ({names}); a bar '
        "behind a mark lasts until another process runs in its place.</figcaption></figure>"
        + table("Failures and replacements, newest first", head, rows, "incident-table")
    )


def _back(incident: Incident, view: View) -> str:
    if incident.back_sec is not None:
        taken = duration(incident.back_sec - incident.time_sec)
        return f"{text(incident.successor)} after {taken}"
    return "not yet" if view.is_open(incident) else "not needed"


def _decisions(view: View) -> str:
    rows = (
        (timed(d.time_sec), text(d.job), escape(d.action), text(d.process), text(d.reason))
        for d in view.decisions
    )
    head = ("at", "job", "decision", "process", "why")
    return table("Latest decisions, newest first", head, rows, "decision-table")
