"""A page about a dataset and the runs that were trained on it: one file, no scripts."""

from __future__ import annotations

from pathlib import Path
from string import Template

from pipelines.report_dedup import dedup_section
from pipelines.report_html import Section, escape, sections
from pipelines.report_numbers import count, digits
from schemas.dataset import Dataset, open_dataset
from schemas.manifest import replace_bytes

TEMPLATE = Path(__file__).with_name("report.html")


def write_report(dataset: Path, html: Path, runs: Path | None) -> None:
    """Write the page.

    Args:
        dataset: the dataset.
        html: the file to write.
        runs: directory of finished runs, maybe with `plan.json` and `build.json`, or None.

    Raises:
        SchemaError: the dataset or a run is damaged.
    """
    opened = open_dataset(dataset)
    html.parent.mkdir(parents=True, exist_ok=True)
    replace_bytes(html, page(opened, [dedup_section(opened)]).encode())


def page(dataset: Dataset, shown: list[Section]) -> str:
    """Return the whole page."""
    return Template(TEMPLATE.read_text(encoding="utf-8")).substitute(
        title=escape(f"{dataset.manifest.name}: Presage report"),
        heading=escape(dataset.manifest.name),
        header=facts(dataset),
        sections=sections(shown),
    )


def facts(dataset: Dataset) -> str:
    """Return the line of sizes below the heading."""
    manifests = [s.manifest for s in dataset.segments]
    samples = sum(m.num_samples for m in manifests)
    sessions = sum(m.num_sessions for m in manifests)
    blocks = sum(m.num_blocks for m in manifests)
    return (
        f'<p class="facts">{count(samples)} samples in {count(sessions)} sessions, '
        f"{digits(samples / sessions)} samples per session, {count(blocks)} blocks</p>"
    )
