"""What deduplication found: unique tuples, list values, sessions."""

from __future__ import annotations

from collections.abc import Mapping

from pipelines.report_html import Section, table
from pipelines.report_numbers import count, digits
from schemas.dataset import Dataset
from schemas.manifest import GroupCounts


def group_totals(dataset: Dataset) -> Mapping[str, GroupCounts]:
    """Return the counts of each group over all segments."""
    num_samples = sum(s.manifest.num_samples for s in dataset.segments)
    totals: dict[str, GroupCounts] = {}
    for group in dataset.job.data.groups:
        parts = [s.manifest.groups[group] for s in dataset.segments]
        num_unique = sum(p.num_unique for p in parts)
        totals[group] = GroupCounts(
            num_unique=num_unique,
            dedup_factor=num_samples / num_unique if num_unique else 0.0,
            num_values=sum(p.num_values for p in parts),
            num_values_dedup=sum(p.num_values_dedup for p in parts),
        )
    return totals


def dedup_section(dataset: Dataset) -> Section:
    """Return the section about deduplication."""
    totals = group_totals(dataset)
    rows = [
        (name, count(g.num_unique), digits(g.dedup_factor), count(g.num_values),
         count(g.num_values_dedup))
        for name, g in totals.items()
    ]  # fmt: skip
    finding = ", ".join(f"{name} {digits(g.dedup_factor)}" for name, g in totals.items())
    return Section(
        "dedup",
        "Deduplication",
        f"Samples per unique tuple: {finding or 'no groups'}.",
        table(
            "Dedup groups",
            ["group", "unique tuples", "dedup factor", "list values", "stored list values"],
            rows,
        ),
    )
