"""What sampling kept."""

from __future__ import annotations

from pipelines.report.dedup import group_totals
from pipelines.report.html import Section, table
from pipelines.report.numbers import digits, percent
from schemas.dataset import Dataset


def sampling_sections(dataset: Dataset) -> list[Section]:
    """Return the section about sampling, none for a job without it."""
    config = dataset.job.data.sampling
    if config is None:
        return []
    finding = (
        f"{percent(config.negatives)} of the negatives of the training range were kept, by "
        f"{config.unit}; each has weight {digits(1 / config.negatives)}."
    )
    rows = [(name, digits(found.dedup_factor)) for name, found in group_totals(dataset).items()]
    head = ["group", f"dedup factor, unit {config.unit}"]
    body = table("Dedup factor after sampling", head, rows) if rows else ""
    return [Section("sampling", "Sampling", finding, body)]
