"""The report: one HTML page about a dataset and the runs trained on it, without scripts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined

from presage.pipelines.report.charts import (
    ACCENT,
    OTHER,
    OURS,
    Bar,
    Line,
    Scale,
    bar_chart,
    curve_chart,
)
from presage.pipelines.report.facts import OracleFacts, Run, StorageFacts, find_speed_up, read_facts
from presage.schemas.dataset.opened import open_dataset
from presage.schemas.errors import pluralize
from presage.schemas.storage.location import Location

MAX_LRU_POINTS = 400
"""Points of the drawn LRU curve."""


def write_report(
    dataset: Location | Path, html: Location | Path, runs: Path | Location | None
) -> None:
    """Write the page; the same files give the same bytes.

    `runs` is a finished run, or a directory of runs, optionally with `plan.json` and `build.json`.

    Raises:
        SchemaError: the dataset or a run is damaged, or `runs` contains nothing to show.
    """
    page = render(read_facts(open_dataset(dataset), runs))
    Location.parse(html).write_bytes(page.encode())


def render(facts: Mapping[str, Any]) -> str:
    """Return the page of what `read_facts` returns."""
    environment = Environment(
        loader=PackageLoader("presage.pipelines.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    for function in FILTERS:
        environment.filters[function.__name__] = _with_dash(function)
    return environment.get_template("report.html").render(
        facts, charts=draw_charts(facts), speed_up=find_speed_up(facts["runs"])
    )


# Numbers as text; absent ones are a dash.


def _with_dash(function: Callable[..., str]) -> Callable[..., str]:
    return lambda value, *args: "\N{EN DASH}" if value is None else function(value, *args)


def three_digits(value: float) -> str:
    """Return three significant digits without an exponent.

    Example:
        >>> [three_digits(value) for value in (12.23, 0.0123, 1234.5, 2.0, 0)]
        ['12.2', '0.0123', '1,234', '2.00', '0']
    """
    if not value:
        return "0"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    text = f"{value:#.3g}"
    return f"{value:.3g}" if "e" in text else text.rstrip(".")


def integer(number: float) -> str:
    """Return a whole number with a separator of thousands.

    Example:
        >>> integer(189359)
        '189,359'
    """
    return f"{number:,.0f}"


def size(num_bytes: float) -> str:
    """Return bytes with a decimal unit.

    Example:
        >>> size(8_300_000), size(999), size(1_230_000_000)
        ('8.30 MB', '999 B', '1.23 GB')
    """
    for factor, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if num_bytes >= factor:
            return f"{three_digits(num_bytes / factor)} {unit}"
    return f"{num_bytes:.0f} B"


def percent(share: float, decimals: int = 1) -> str:
    """Return a share in per cent.

    Example:
        >>> percent(0.8312), percent(0.004), percent(0.5, 0)
        ('83.1 %', '0.4 %', '50 %')
    """
    return f"{100 * share:.{decimals}f} %"


def decimals(number: float) -> str:
    """Return a number with four decimals."""
    return f"{number:.4f}"


def ratio(a: float, b: float) -> str:
    """Return how many times larger `a` is.

    Example:
        >>> ratio(8.3, 0.68), ratio(1, 0)
        ('12.2', 'n/a')
    """
    return three_digits(a / b) if b else "n/a"


def compared(ours: float, other: float) -> str:
    """Return the comparison of a size with another one.

    Example:
        >>> compared(2.0, 8.0), compared(1.19, 1.0), compared(3.0, 3.0)
        ('4.00 times smaller than', '1.19 times as large as', 'as large as')
    """
    if ratio(max(ours, other), min(ours, other)) == "1.00":
        return "as large as"
    if ours < other:
        return f"{ratio(other, ours)} times smaller than"
    return f"{ratio(ours, other)} times as large as"


FILTERS = (integer, three_digits, size, percent, decimals, ratio, compared, pluralize)


# Charts: facts to SVG.


def draw_charts(facts: Mapping[str, Any]) -> dict[str, str]:
    """Return the charts of the page by name; those without data are left out."""
    charts = {"storage": storage_chart(facts["storage"])}
    if facts["oracle"]:
        charts["cache_curve"] = cache_curve_chart(facts["oracle"])
    if facts["runs"]:
        charts["speeds"] = speed_chart(facts["runs"])
    return charts


def storage_chart(storage: StorageFacts) -> str:
    """Return the bytes of plain files and of the dataset's parts."""
    plain = [
        Bar(name, v, f"{size(v)}  ({ratio(v, storage.columns)} x the same columns here)", OTHER)
        for name, v in storage.plain.items()
    ]
    own = {
        "Presage, the same columns": (storage.columns, OURS),
        "Presage, derived columns": (storage.derived, ACCENT),
        "Presage, statistics and manifests": (storage.other, ACCENT),
        "Presage, oracle (apart)": (storage.oracle, ACCENT),
    }
    bars = plain + [Bar(name, v, size(v), color) for name, (v, color) in own.items()]
    return bar_chart("Bytes on disk", bars)


def cache_curve_chart(oracle: OracleFacts) -> str:
    """Return the hit rates over cache sizes of the largest table."""
    report, lru, optimal = oracle.tables[oracle.largest], oracle.lru, oracle.optimal
    rows = report.num_unique_rows
    drawn = np.unique(np.linspace(0, len(lru.capacities) - 1, MAX_LRU_POINTS).astype(np.int64))
    share = report.peak_cache_rows / rows
    marker = {"marker": "o", "ls": "", "ms": 9, "mec": "white", "mew": 1.5}
    plan = f"plan: {percent(report.hit_rate)}"
    return curve_chart(
        f"Hit rate over cache size for table {oracle.largest}",
        [
            Line("best possible", optimal.capacities / rows, optimal.hit_rates, OURS),
            Line("LRU", lru.capacities[drawn] / rows, lru.hit_rates[drawn], OTHER),
            Line(plan, np.array([share]), np.array([report.hit_rate]), ACCENT, marker),
        ],
        Scale("cache size, share of the touched rows", lambda x: percent(x, 0), 0, 1),
        Scale("hit rate", lambda x: percent(x, 0), 0),
    )


def run_color(run: Run) -> str:
    """Return the color of a run: grey without deduplication."""
    if run.summary.expanded:
        return OTHER
    return OURS if run.summary.embedding == "plain" else ACCENT


def speed_chart(runs: Sequence[Run]) -> str:
    """Return the samples per second of each run."""
    bars = [
        Bar(r.name, r.summary.samples_per_sec, integer(r.summary.samples_per_sec), run_color(r))
        for r in runs
    ]
    return bar_chart("Samples per second", bars)
