"""What sampling kept, and what the other unit of it would do to deduplication."""

from __future__ import annotations

from pipelines.report.dedup import group_totals
from pipelines.report.html import Section, paragraph, table
from pipelines.report.numbers import count, digits, percent
from pipelines.samples.sampling_units import UNITS
from schemas.dataset import Dataset
from schemas.layout import SAMPLING


def estimated_factors(dataset: Dataset) -> dict[str, dict[str, float]]:
    """Return for each unit the estimated dedup factor of each group, over all segments."""
    samples: dict[tuple[str, str], int] = {}
    unique: dict[tuple[str, str], int] = {}
    for segment in dataset.segments:
        for row in segment.file(SAMPLING).read().to_pylist():
            key = row["unit"], row["group"]
            samples[key] = samples.get(key, 0) + row["num_samples"]
            unique[key] = unique.get(key, 0) + row["num_unique"]
    return {
        unit: {g: n / max(1, unique[u, g]) for (u, g), n in samples.items() if u == unit}
        for unit in UNITS
    }


def num_keys(dataset: Dataset) -> int:
    """Return the session keys that the estimate looked at, summed over segments."""
    found = (s.file(SAMPLING).read(["num_keys"])["num_keys"].to_pylist() for s in dataset.segments)
    return sum(max(keys, default=0) for keys in found)


def sampling_sections(dataset: Dataset) -> list[Section]:
    """Return the section about sampling, none for a job without it."""
    config = dataset.job.data.sampling
    if config is None:
        return []
    factors = estimated_factors(dataset)
    measured = group_totals(dataset)
    rows = [
        (
            name,
            digits(measured[name].dedup_factor),
            *(digits(factors[unit].get(name, 0.0)) for unit in UNITS),
        )
        for name in measured
    ]
    head = ["group", f"measured, unit {config.unit}"]
    head += [f"estimated, unit {unit}" for unit in UNITS]
    other = next(unit for unit in UNITS if unit != config.unit)
    finding = (
        f"{percent(config.negatives)} of the negatives of the training range were kept, by "
        f"{config.unit}; each stands for {digits(1 / config.negatives)}."
    )
    note = (
        f"Both estimates come from the training samples of the same {count(num_keys(dataset))} "
        "session keys, those with the smallest hashes, counted before any was dropped: distinct "
        "tuples within a session key, without block edges and evaluation samples. They say how "
        f"unit {other} would compare; only the measured figure is of this dataset."
    )
    title = "Dedup factor by the unit that shares a draw"
    body = table(title, head, rows) if rows else ""
    return [Section("sampling", "Sampling", finding, body + paragraph(note, "note"))]
