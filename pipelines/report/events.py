"""What became of the events that were joined to the features."""

from __future__ import annotations

from pipelines.report.html import Section, paragraph, table
from pipelines.report.numbers import count, percent
from pipelines.sources.late import add_counts, read_counts
from pipelines.sources.streams import COUNTS
from schemas.dataset import Dataset

_MEANING = {
    "features": "rows of features",
    "without_event": "of them, without an event",
    "events": "events",
    "late": "of them, too late",
    "unmatched": "of them, without features",
    "duplicates": "pairs beyond the first event of the same features",
}


def event_sections(dataset: Dataset) -> list[Section]:
    """Return the section about events, none for a job without them."""
    config = dataset.job.data.samples.events
    found = add_counts(read_counts(segment) for segment in dataset.segments)
    if config is None or not found:
        return []
    finding = (
        f"{percent(1 - found['without_event'] / max(1, found['features']))} of the features have "
        f"an event within {config.label_wait}."
    )
    rows = [(_MEANING[name], count(found[name])) for name in COUNTS]
    note = "Events that do not count are in each segment's late/, with file and position."
    body = table("Features and events", ["", "rows"], rows) + paragraph(note, "note")
    return [Section("events", "Events", finding, body)]
