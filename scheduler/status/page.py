"""The status page: one HTML document without external resources.

Sections and tables have ids, so that `status.js` can update them in place.
"""

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
    details,
    incident_chart,
    mark,
    meter,
    speed_chart,
    table,
    text,
    timestamp,
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
    describe_move,
    digits,
    duration,
    memory,
    percent,
)
from schemas.hashing import NUM_SLOTS

TEMPLATE = Template(Path(__file__).with_name("page.html").read_text(encoding="utf-8"))
POOL_WORDS = {
    "segment": "segment jobs",
    "lead": "coordinator",
    "replica": "replicas",
    "store": "stores",
}
UNITS: dict[SpeedPool, tuple[str, str]] = {
    "preprocessing": ("Speed of one segment job", "rows/s"),
    "training": ("Speed of training", "samples/s"),
}
LATEST = 12
"""Rows of the table beside a chart."""
TONES = 4
"""Cell styles; consecutive stores differ."""


def page(view: View) -> str:
    """Return the document."""
    return TEMPLATE.substitute(
        title=escape(headline(view)),
        headline=escape(headline(view)),
        now=timestamp(view.now_sec),
        events=escape(counted(view.num_events, "event")),
        tiles=_tiles(view),
        links=_links(view.jobs),
        budget=_budget(view),
        jobs="\n".join(_job(number, job, view) for number, job in enumerate(view.jobs, 1)),
        incidents=_incidents(view),
        decisions=_decisions(view),
    )


def headline(view: View) -> str:
    """Return the status in one line."""
    phases = [job.phase for job in view.jobs]
    if not phases:
        return "no job yet"
    counts = ", ".join(f"{phases.count(phase)} {phase}" for phase in dict.fromkeys(phases))
    line = f"{counted(len(phases), 'job')}: {counts}"
    missing = sum(map(view.is_open, view.incidents))
    return f"{line}; {counted(missing, 'replacement')} pending" if missing else line


def _tiles(view: View) -> str:
    forecasts = [job.forecast for job in view.jobs if job.forecast is not None]
    spent = sum(job.spent for job in view.jobs)
    total = spent + sum(forecast.left_cost for forecast in forecasts)
    left_sec = max((forecast.left_sec for forecast in forecasts), default=None)
    num_incidents = sum(n for _, _, n in view.num_incidents)
    num_replaced = sum(i.back_sec is not None for i in view.incidents)
    tiles = (
        ("Cores reserved", digits(view.used_cpus), f"of {digits(view.cpus)}"),
        ("Memory reserved", memory(view.used_memory_bytes), f"of {memory(view.memory_bytes)}"),
        ("Cost so far", digits(spent), f"{digits(total)} predicted in all"),
        (
            "Time left",
            "none" if left_sec is None else duration(left_sec),
            f"{duration(view.now_sec - view.begun_sec)} since the start",
        ),
        ("Incidents", f"{num_incidents:,}", f"{num_replaced:,} replaced"),
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
    if not view.usage or view.now_sec <= view.usage[0].time_sec:
        return "<p>No usage yet.</p>"
    chart = usage_chart(view.usage, view.cpus, view.now_sec)
    rows = [(timestamp(u.time_sec), digits(u.cpus), memory(u.memory_bytes)) for u in view.usage]
    head = ("from", "cores", "memory")
    return (
        f"<figure>{chart}<figcaption>Reserved cores over time (solid) under the budget "
        f"(dashed).</figcaption></figure>"
        + details("Changes as a table", table("Latest changes", head, rows[-LATEST:], "usage"))
    )


def _job(number: int, job: JobView, view: View) -> str:
    key = f"job-{number}"
    processes = [process for pool in job.pools for process in pool.processes]
    parts = [
        f"<p>{text(job.last_reason)}</p>" if job.last_reason else "",
        _progress(job),
        _costs(job, view),
        table("Pools", ("pool", "wanted", "running", "starting", "leaving", "cores", "memory"),
              map(_pool_row, job.pools), f"{key}-pools") if job.pools else "",
        _stores_section(job.stores, f"{key}-stores") if job.stores else "",
        '<div class="pair">',
        *(_speed(job, pool, key, view.now_sec) for pool in UNITS),
        "</div>",
        table("Processes: memory against limit", ("process", "status", "since", "cores", "memory"),
              map(_process_row, processes), f"{key}-processes") if processes else "",
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


def _costs(job: JobView, view: View) -> str:
    elapsed = (view.now_sec if job.ended_sec is None else job.ended_sec) - job.since_sec
    hourly = f", {digits(job.hour_price)} an hour as reserved now" if job.hour_price else ""
    facts = [
        f"cost so far {digits(job.spent)}{hourly}",
        f"{'running for' if job.ended_sec is None else 'ran'} {duration(elapsed)}",
    ]
    forecast = job.forecast
    if forecast is not None:
        total = job.spent + forecast.left_cost
        facts += [
            f"predicted: {duration(forecast.left_sec)} more, cost {digits(total)} in all",
            f"step times {percent(forecast.low)} to {percent(forecast.high)} of the prediction "
            f"({'narrow enough' if forecast.confident else 'too wide'} to act upon)",
        ]
    if job.deadline_sec is not None:
        late = elapsed + (forecast.left_sec if forecast else 0.0) - job.deadline_sec
        facts.append(
            f"deadline after {duration(job.deadline_sec)}: "
            + (f"late by {duration(late)}" if late > 0 else f"{duration(-late)} to spare")
        )
    return f'<ul class="facts">{"".join(f"<li>{escape(fact)}</li>" for fact in facts)}</ul>'


def _pool_row(pool: PoolView) -> tuple[str, ...]:
    return (
        escape(POOL_WORDS[pool.name]),
        str(pool.wanted),
        *(str(pool.count(status)) for status in ("running", "starting", "leaving")),
        digits(sum(process.cpus for process in pool.processes)),
        memory(sum(process.limit_bytes for process in pool.processes)),
    )


def _process_row(process: ProcessView) -> tuple[str, ...]:
    resident, limit = process.resident_bytes, process.limit_bytes
    used = "not read yet" if resident is None else memory(resident)
    if limit and resident is not None:
        share = resident / limit
        label = f"{used} of {memory(limit)} ({percent(share)})"
        memory_cell = meter(share, label, is_limit=True)
    else:
        memory_cell = escape(f"{used}, limit {memory(limit)}" if limit else used)
    cores = digits(process.cpus)
    if process.busy_cores is not None:
        cores = f"{digits(round(process.busy_cores, 2))} of {cores}"
    since = timestamp(process.since_sec)
    return text(process.name), process.status, since, cores, memory_cell


def _speed(job: JobView, pool: SpeedPool, key: str, now_sec: float) -> str:
    speeds = [speed for speed in job.speeds if speed.pool == pool]
    title, unit = UNITS[pool]
    if not speeds:
        return f"<div><h3>{title}</h3><p>No measurement yet.</p></div>"
    last = speeds[-1]
    error = last.measured / last.predicted - 1.0
    comparison = f"{percent(abs(error))} {'more' if error > 0 else 'less'} than predicted before"
    comparison = "as predicted before" if abs(error) < 0.005 else comparison
    line = f"Measured {digits(last.measured)} {unit}, {comparison} ({digits(last.predicted)})."
    end_sec = now_sec if job.ended_sec is None else job.ended_sec
    rows = [
        (timestamp(s.time_sec), str(s.num_processes), digits(s.measured), digits(s.predicted),
         f"{digits(s.low)} to {digits(s.high)}")
        for s in reversed(speeds[-LATEST:])
    ]  # fmt: skip
    head = ("at", "processes", "measured", "predicted", "90 % interval")
    measurements = table(f"{title}, {unit}", head, rows, f"{key}-{pool}")
    return (
        f"<div><h3>{title}</h3><p>{escape(line)}</p>"
        f"<figure>{speed_chart(speeds, title, unit, end_sec)}<figcaption>Measured (line with "
        "dots), predicted before each measurement (dashed) and its 90 % interval (band)."
        f"</figcaption></figure>{details('Measurements as a table', measurements)}</div>"
    )


def _stores_section(stores: Stores, key: str) -> str:
    ahead = f"accesses in {LOOKAHEAD_SEC:.0f} s"
    head = ("store", "process", "ranges", "accesses now", ahead)
    rows = map(_store_row, stores.stores)
    note = f"The {NUM_SLOTS:,} slots of rows are owned and moved in {NUM_RANGES} ranges."
    if stores.step is not None:
        note += f" Accesses are those of the oracle around step {stores.step:,}"
        note += "." if stores.step_ahead is None else f" and around step {stores.step_ahead:,}."
    return (
        f'<section id="{key}" class="stores" aria-labelledby="{key}-title">'
        f'<h3 id="{key}-title">Stores</h3>'
        f"{_range_cells(stores)}{table('Stores and their ranges', head, rows, f'{key}-table')}"
        f'<p class="soft">{escape(note)}</p></section>'
    )


def _range_cells(stores: Stores) -> str:
    """Return a cell for each slot range with its owner."""
    if not stores.owners:
        return "<p>No range has a store yet.</p>"
    indices = {store.number: index for index, store in enumerate(stores.stores)}
    cells = "".join(
        _range_cell(number, owner, indices[owner] % TONES, stores.move)
        for number, owner in enumerate(stores.owners)
    )
    move = stores.move
    moving = "No range is moving." if move is None else f"{describe_move(move).capitalize()}."
    return (
        f"<p>{escape(moving)}</p>"
        f'<ol class="ranges" role="list" aria-label="Store of each range">{cells}</ol>'
        '<p class="soft">Large: the store; small: the slot range that it owns.</p>'
    )


def _range_cell(number: int, owner: int, tone: int, move: Move | None) -> str:
    label = f"<span>{_unseen('range ')}{number}{_unseen(': ')}</span>"
    if move is None or number not in move.ranges:
        return f'<li class="tone-{tone}">{label}<strong>{_unseen("store ")}{owner}</strong></li>'
    target = "" if move.target is None else f"<span> to {move.target}</span>"
    return (
        f'<li class="tone-{tone} moves">{label}'
        f"<strong>{_unseen('moving from ')}{owner}</strong>{target}</li>"
    )


def _unseen(words: str) -> str:
    """Return text for screen readers only."""
    return f'<span class="unseen">{words}</span>'


def _store_row(store: StoreView) -> tuple[str, ...]:
    process = "no process" if store.process is None else text(store.process.name)
    shares = _share(store.share), _share(store.share_ahead)
    return str(store.number), process, escape(format_spans(store.ranges)), *shares


def _share(share: float | None) -> str:
    return "not known yet" if share is None else meter(share, percent(share))


def _incidents(view: View) -> str:
    if not view.incidents:
        return "<p>No incidents.</p>"
    jobs = [job.name for job in view.jobs]
    chart = incident_chart(view.incidents, jobs, view.begun_sec, view.now_sec)
    keys = "".join(
        f"<li>{mark(kind)} {escape(word)}</li>"
        for kind, word in KIND_WORDS.items()
        if any(i.kind == kind for i in view.incidents)
    )
    names = "; ".join(f"{number}: {text(name)}" for number, name in enumerate(jobs, 1))
    rows = (
        (timestamp(i.time_sec), text(i.job), text(i.process), KIND_WORDS[i.kind], text(i.detail),
         _replacement(i, view))
        for i in view.incidents
    )  # fmt: skip
    head = ("at", "job", "process", "what", "why", "replaced")
    return (
        f'<ul class="keys">{keys}</ul><figure>{chart}<figcaption>Rows are jobs ({names}); a bar '
        "lasts until a replacement runs.</figcaption></figure>"
        + table("Failures and replacements, newest first", head, rows, "incident-table")
    )


def _replacement(incident: Incident, view: View) -> str:
    if incident.back_sec is not None:
        delay = duration(incident.back_sec - incident.time_sec)
        return f"{text(incident.successor)} after {delay}"
    return "not yet" if view.is_open(incident) else "not needed"


def _decisions(view: View) -> str:
    rows = (
        (timestamp(d.time_sec), text(d.job), escape(d.action), text(d.process), text(d.reason))
        for d in view.decisions
    )
    head = ("at", "job", "decision", "process", "why")
    return table("Latest decisions, newest first", head, rows, "decision-table")
