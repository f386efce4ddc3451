"""Section on the oracle: accesses, hit rates, load per slot."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from pipelines.report.charts import ACCENT, HALF, OTHER, OURS, Line, Point, Scale, curve_chart
from pipelines.report.html import (
    Section,
    count,
    details,
    figure,
    percent,
    ratio,
    short,
    side_by_side,
    table,
)
from pipelines.table.indexes import PolicyReport, TableReport, policy_reports, table_report
from schemas.accesses import TableAccesses, TableLoad, index_load, indexed_steps
from schemas.cache_plan import Plan, PlanStep
from schemas.dataset import Dataset
from schemas.miss_ratio import EXACT_OPTIMAL, HitRateCurve, lru_curve, optimal_curve
from schemas.order import Order


def load_tables(name: str, load: TableLoad) -> str:
    """Return the load of one table, to be opened by a click.

    Args:
        name: of the table.
        load: at least one access.
    """
    entries = int(load.reuse.sum()) + load.never
    bins = np.flatnonzero(load.reuse).tolist()
    rows = [(steps_of(i), count(load.reuse[i]), percent(load.reuse[i] / entries)) for i in bins]
    rows.append(("never again", count(load.never), percent(load.never / entries)))
    reuse = table(
        f"Table {name}: steps until a row is used again.", ["steps", "accesses", "share"], rows
    )
    total = load.slots.sum(axis=1)
    even = table(
        f"Table {name}: accesses of {load.slots.shape[1]} equal ranges of hash slots in each "
        f"{load.slots.shape[0]}th of the run; over all of it the busiest range has "
        f"{load.imbalance:.2f} times the mean. A step needs {count(load.rows_per_step.mean())} "
        f"rows on average, {count(load.rows_per_step.max())} at most.",
        ["part of the run", "accesses", "idlest range", "busiest range"],
        [
            (f"{i + 1}", count(total[i]), count(part.min()), count(part.max()))
            for i, part in enumerate(load.slots)
        ],
    )
    return details(f"Reuse distances and load of table {name}", reuse + even)


def steps_of(power: int) -> str:
    """Return the distances of a bin.

    Example:
        >>> steps_of(0), steps_of(3)
        ('1', '8 to 15')
    """
    return "1" if power == 0 else f"{2**power} to {2 ** (power + 1) - 1}"


MOST_TABLES = 10
"""Tables that are shown at once; the others open on a click."""
LRU_POINTS = 400
"""Points of the drawn LRU curve."""
OPTIMAL_WORK = 12_000_000
"""Accesses times capacities for the optimal curve: about 10 seconds."""


@dataclass(frozen=True, slots=True)
class OracleFacts:
    """Everything the section shows.

    Attributes:
        tables: table to what the job's plan does with it, most accesses first.
        policies: table to what each policy would do with it, in caches of one size.
        num_steps: steps of the run.
        lookahead: steps that the plan looks ahead.
        largest: name of the table with the most accesses.
        lru: hit rates of the least recently used rows.
        optimal: best possible hit rates.
        plan: the plan of the largest table.
        load: of the largest table.
    """

    tables: Mapping[str, TableReport]
    policies: Mapping[str, Mapping[str, PolicyReport]]
    num_steps: int
    lookahead: int
    largest: str
    lru: HitRateCurve
    optimal: HitRateCurve
    plan: tuple[tuple[int, int, int], ...]
    load: TableLoad

    @property
    def total(self) -> TableReport:
        """Sums over all tables."""
        reports = list(self.tables.values())
        accesses = sum(r.num_accesses for r in reports)
        fetched = sum(r.fetched_rows for r in reports)
        return TableReport(
            num_lookups=sum(r.num_lookups for r in reports),
            num_lookups_dedup=sum(r.num_lookups_dedup for r in reports),
            num_accesses=accesses,
            num_unique_rows=sum(r.num_unique_rows for r in reports),
            fetched_rows=fetched,
            hit_rate=1 - fetched / accesses if accesses else 0.0,
            peak_cache_rows=sum(r.peak_cache_rows for r in reports),
        )


def default_order(dataset: Dataset) -> Order:
    """Return the order of the index that was built with the dataset."""
    oracle = dataset.job.data.oracle
    shuffle, seed = oracle.order.shuffle, oracle.order.seed
    return dataset.order(oracle.batch_samples, oracle.epochs, shuffle, seed)


def oracle_facts(dataset: Dataset) -> OracleFacts | None:
    """Run the job's plan over every table, and the curves over the largest.

    Returns:
        The facts, or None when training looks nothing up.
    """
    order, cache = default_order(dataset), replace(dataset.job.train.cache, rows=None)
    policies = {
        name: policy_reports(dataset, name, order, cache) for name in dataset.job.data.tables
    }
    tables = {
        name: table_report(dataset, name, order, cache, found) for name, found in policies.items()
    }
    tables = dict(sorted(tables.items(), key=lambda t: (-t[1].num_accesses, t[0])))
    largest = next((name for name, report in tables.items() if report.num_accesses), None)
    if largest is None:
        return None
    report, trace = tables[largest], TableAccesses(dataset, largest, order)
    index = dataset.index_for(order)
    steps = indexed_steps(dataset, index, largest, order)
    return OracleFacts(
        tables=tables,
        policies=policies,
        num_steps=order.num_steps,
        lookahead=cache.lookahead,
        largest=largest,
        lru=lru_curve(trace.steps(), report.num_accesses, report.num_unique_rows),
        optimal=_optimal(trace.steps(), report.num_accesses),
        plan=tuple(map(_step, Plan(steps, cache))),
        load=index_load(dataset, largest, order),
    )


def _optimal(steps: Iterator[NDArray[np.int64]], num_accesses: int) -> HitRateCurve:
    """Return the best possible curve, with as many points as the work allows."""
    points = int(np.clip(OPTIMAL_WORK // max(1, min(num_accesses, EXACT_OPTIMAL)), 8, 64))
    return optimal_curve(steps, num_accesses, points)


def _step(step: PlanStep) -> tuple[int, int, int]:
    return len(step.numbers), int(step.fetch.sum()), step.resident_rows


def oracle_section(facts: OracleFacts) -> Section:
    """Return the section about the oracle."""
    total = facts.total
    ceiling = 1 - total.num_unique_rows / total.num_accesses
    most = (
        "the most that any cache can"
        if total.fetched_rows == total.num_unique_rows
        else f"any cache can answer {percent(ceiling)} at most"
    )
    return Section(
        "oracle",
        "Oracle and cache",
        f"Deduplication does {ratio(total.num_lookups, total.num_lookups_dedup)} times fewer "
        f"look-ups, and because the future is known, a cache of "
        f"{percent(total.peak_cache_rows / total.num_unique_rows)} of the touched rows answers "
        f"{percent(total.hit_rate)} of all accesses: {most}, since every row must be read once.",
        side_by_side(_cache_curve(facts), _over_time(facts))
        + _policies(facts)
        + _tables(facts)
        + load_tables(facts.largest, facts.load),
    )


def _cache_curve(facts: OracleFacts) -> str:
    report = facts.tables[facts.largest]
    rows = report.num_unique_rows
    drawn = np.unique(np.linspace(0, len(facts.lru.capacities) - 1, LRU_POINTS).astype(np.int64))
    share = report.peak_cache_rows / rows
    lines = [
        Line("best possible", facts.optimal.capacities / rows, facts.optimal.hit_rates, OURS),
        Line("LRU", facts.lru.capacities[drawn] / rows, facts.lru.hit_rates[drawn], OTHER),
    ]
    lru, best = facts.lru.at(report.peak_cache_rows), facts.optimal.at(report.peak_cache_rows)
    label = (
        f"Hit rate over cache size for table {facts.largest}: at {percent(share)} of the touched "
        f"rows the plan reaches {percent(report.hit_rate)}, the best possible cache "
        f"{percent(best)}, least recently used {percent(lru)}."
    )
    chart = curve_chart(
        "cache-curve", label, lines,
        Scale("cache size, share of the touched rows", _percent, 0, 1),
        Scale("hit rate", _percent, 0, None),
        [Point(f"plan: {percent(report.hit_rate)}", share, report.hit_rate, ACCENT)],
        HALF,
    )  # fmt: skip
    return figure(
        chart,
        f"Table {facts.largest}, {count(report.num_unique_rows)} rows touched. The plan keeps a "
        f"row while its next use is at most {facts.lookahead} steps away{_whole(facts)}; at its "
        f"size LRU would answer {percent(lru)} and the best possible cache {percent(best)}."
        f"{_errors(facts)}",
    )


def _errors(facts: OracleFacts) -> str:
    lru, best = facts.lru, facts.optimal
    sampled = f" LRU from {percent(lru.share)} of the rows, to {percent(lru.error)}."
    between = f" The best possible lies at most {percent(best.error)} above its line."
    if best.share < 1:
        between = (
            f" The best possible from {percent(best.share)} of the rows, to {percent(best.error)}."
        )
    return (sampled if lru.share < 1 else "") + (between if best.error > 0 else "")


def _whole(facts: OracleFacts) -> str:
    return ", which is the whole run" if facts.lookahead >= facts.num_steps - 1 else ""


def _over_time(facts: OracleFacts) -> str:
    accessed, fetched, resident = np.array(facts.plan, np.float64).reshape(-1, 3).T
    steps = np.arange(len(accessed), dtype=np.float64)
    lines = [
        Line("in the cache", steps, resident, OTHER, at=0.5),
        Line("accessed", steps, accessed, OURS, at=0.5),
        Line("fetched", steps, fetched, ACCENT, at=0.5),
    ]
    label = (
        f"Rows of table {facts.largest} in each step: {count(accessed.mean())} accessed and "
        f"{count(fetched.mean())} fetched on average, at most {count(resident.max())} in the cache."
    )
    chart = curve_chart(
        "cache-load", label, lines, Scale("step", count), Scale("rows", short, 0, None), (), HALF
    )
    return figure(
        chart,
        f"Table {facts.largest}, every step of the run, known before it starts: "
        f"{count(accessed.mean())} rows accessed and {count(fetched.mean())} fetched on average.",
    )


def _policies(facts: OracleFacts) -> str:
    """Return what both policies read in caches of one size, over all tables."""
    names = {"ttl": f"time to live, {count(facts.lookahead)} steps", "belady": "Belady's optimum"}
    rows: list[tuple[str, ...]] = []
    for policy, name in names.items():
        found = [reports[policy] for reports in facts.policies.values()]
        fetched = sum(f.fetched_rows or 0 for f in found)
        rows.append(
            (
                name, count(sum(f.peak_cache_rows or 0 for f in found)), count(fetched),
                count(sum(f.written_rows or 0 for f in found)),
                percent(1 - fetched / facts.total.num_accesses),
                count(sum(f.required_rows for f in found)),
            )
        )  # fmt: skip
    return table(
        "What each policy does in caches of the size that a time to live takes, all tables",
        ["policy", "cache rows", "fetched rows", "written back", "hit rate", "smallest cache"],
        rows,
    )


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _tables(facts: OracleFacts) -> str:
    head = [
        "table", "look-ups", "deduplicated", "accesses", "unique rows", "fetched rows", "hit rate",
        "peak cache rows",
    ]  # fmt: skip
    names = list(facts.tables)
    rows = [_row(name, facts.tables[name]) for name in names]
    total = _row(f"all {len(names)} tables", facts.total)
    caption = (
        f"Training range, {count(facts.num_steps)} steps, look-ahead {facts.lookahead}. An access "
        "is a row that a step needs, once per step."
    )
    shown = table(caption, head, rows[:MOST_TABLES], total)
    if len(rows) <= MOST_TABLES:
        return shown
    rest = table("The other tables", head, rows[MOST_TABLES:])
    return shown + details(f"The other {len(rows) - MOST_TABLES} tables", rest)


def _row(name: str, r: TableReport) -> tuple[str, ...]:
    return (
        name, count(r.num_lookups), count(r.num_lookups_dedup), count(r.num_accesses),
        count(r.num_unique_rows), count(r.fetched_rows), percent(r.hit_rate),
        count(r.peak_cache_rows),
    )  # fmt: skip
