"""A page about a dataset and the runs that were trained on it: one file, no scripts.

manifests, expanded rows, index, runs -> facts -> one section each -> template.
"""

from __future__ import annotations

from pathlib import Path
from string import Template

from pipelines.report.baselines import flat_bytes, flat_rows
from pipelines.report.dedup import dedup_section
from pipelines.report.events import event_sections
from pipelines.report.gate import gate_section
from pipelines.report.groups import groups_section
from pipelines.report.headline import facts, headline
from pipelines.report.html import Section, escape, sections, tiles
from pipelines.report.method import method_section
from pipelines.report.oracle import oracle_facts, oracle_section
from pipelines.report.plan import BUILD, PLAN, pools_section, read_object
from pipelines.report.runs import read_runs, training_section
from pipelines.report.sampling import sampling_sections
from pipelines.report.storage import storage_section
from schemas.dataset import open_dataset
from schemas.errors import SchemaError
from schemas.events import SUMMARY
from schemas.manifest import replace_bytes

TEMPLATE = Path(__file__).with_name("report.html")


def write_report(dataset: Path, html: Path, runs: Path | None) -> None:
    """Write the page; the same files give the same bytes.

    Args:
        dataset: the dataset.
        html: the file to write.
        runs: a finished run, or a directory of some, maybe with `plan.json` and `build.json`; or
            None.

    Raises:
        SchemaError: the dataset or a run is damaged, or there is no such directory of runs.
    """
    if runs is not None and not runs.is_dir():
        raise SchemaError(
            "runs must be a directory, got none; train with --output below it, or leave --runs out",
            file=str(runs),
        )
    opened = open_dataset(dataset)
    found = read_runs(runs)
    rows = flat_rows(opened)
    flat = flat_bytes(rows, opened.job.data.session.time)
    oracle = oracle_facts(opened)
    plan = read_object(runs / PLAN) if runs else None
    build = read_object(runs / BUILD) if runs else None
    if build is not None and build.get("built") is False:
        build = None  # the segment was there already: nothing was measured
    if runs and not (found or plan or build):
        raise SchemaError(
            f"runs must be a finished run or a folder of some, got no {SUMMARY}; give what trainer "
            "train had as --output, or leave --runs out",
            file=str(runs),
        )
    groups = groups_section(opened, rows)
    shown = [
        storage_section(opened, flat, rows),
        dedup_section(opened),
        *([groups] if groups else []),
        *sampling_sections(opened),
        *event_sections(opened),
        gate_section(opened),
        *([oracle_section(oracle)] if oracle else []),
        *([training_section(found)] if found else []),
        *([pools_section(plan, build)] if plan or build else []),
        method_section(opened, found, plan is not None, build is not None),
    ]
    head = facts(opened) + tiles(headline(opened, flat, oracle, found))
    html.parent.mkdir(parents=True, exist_ok=True)
    replace_bytes(html, page(opened.manifest.name, head, shown).encode())


def page(name: str, header: str, shown: list[Section]) -> str:
    """Return the whole page."""
    return Template(TEMPLATE.read_text(encoding="utf-8")).substitute(
        title=escape(f"Presage report: {name}"),
        heading=escape(f"Presage report: {name}"),
        header=header,
        sections=sections(shown),
    )
