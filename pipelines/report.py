"""A page about a dataset and the runs that were trained on it: one file, no scripts.

manifests, expanded rows, index, runs -> facts -> one section each -> template.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from string import Template

from pipelines.baselines import SHUFFLED, flat_bytes, flat_rows
from pipelines.report_dedup import dedup_section
from pipelines.report_html import Section, Tile, escape, sections, tiles
from pipelines.report_method import method_section
from pipelines.report_numbers import count, digits, percent, ratio, size
from pipelines.report_oracle import OracleFacts, oracle_facts, oracle_section
from pipelines.report_plan import BUILD, PLAN, build_table, plan_section, read_object
from pipelines.report_runs import Run, read_runs, speed_up, training_section
from pipelines.report_storage import dataset_bytes, storage_section
from schemas.dataset import Dataset, open_dataset
from schemas.manifest import replace_bytes

TEMPLATE = Path(__file__).with_name("report.html")


def write_report(dataset: Path, html: Path, runs: Path | None) -> None:
    """Write the page; the same files give the same bytes.

    Args:
        dataset: the dataset.
        html: the file to write.
        runs: directory of finished runs, maybe with `plan.json` and `build.json`, or None.

    Raises:
        SchemaError: the dataset or a run is damaged.
    """
    opened = open_dataset(dataset)
    found = read_runs(runs)
    rows = flat_rows(opened)
    flat = flat_bytes(rows, opened.job.data.session.time)
    oracle = oracle_facts(opened)
    plan = read_object(runs / PLAN) if runs else None
    build = read_object(runs / BUILD) if runs else None
    shown = [
        storage_section(opened, flat, rows),
        dedup_section(opened),
        oracle_section(oracle),
        *([training_section(found)] if runs else []),
        *([plan_section(plan)] if plan else []),
        method_section(opened, found, plan is not None, build is not None),
    ]
    head = facts(opened) + tiles(headline(opened, flat, oracle, found))
    if build:
        head += build_table(build)
    html.parent.mkdir(parents=True, exist_ok=True)
    replace_bytes(html, page(opened.manifest.name, head, shown).encode())


def page(name: str, header: str, shown: list[Section]) -> str:
    """Return the whole page."""
    return Template(TEMPLATE.read_text(encoding="utf-8")).substitute(
        title=escape(f"{name}: dataset and training"),
        heading=escape(name),
        header=header,
        sections=sections(shown),
    )


def facts(dataset: Dataset) -> str:
    """Return the line of sizes below the heading."""
    manifests = [s.manifest for s in dataset.segments]
    samples = sum(m.num_samples for m in manifests)
    sessions = sum(m.num_sessions for m in manifests)
    blocks = {split: 0 for m in manifests for split in sorted(m.splits)}
    for manifest in manifests:
        for split, (_, num_blocks) in manifest.splits.items():
            blocks[split] += num_blocks
    parts = [
        f"{count(samples)} samples in {count(sessions)} sessions, "
        f"{digits(samples / sessions)} samples per session",
        f"{count(sum(blocks.values()))} blocks of {count(dataset.job.data.block_samples)} samples ("
        + ", ".join(f"{count(n)} {split}" for split, n in blocks.items())
        + ")",
        f"{len(manifests)} {'segment' if len(manifests) == 1 else 'segments'}",
        f"{count(sum(m.num_rejects for m in manifests))} rejected rows",
        f"raw input {size(sum(m.input_bytes for m in manifests))}",
    ]
    return f'<p class="facts">{escape("; ".join(parts))}</p>'


def headline(
    dataset: Dataset, flat: Mapping[str, float], oracle: OracleFacts, runs: list[Run]
) -> list[Tile]:
    """Return the headline numbers."""
    ours, total = dataset_bytes(dataset), oracle.total
    shown = [
        Tile(
            f"{ratio(flat[SHUFFLED], ours)} x",
            "smaller than shuffled Parquet",
            f"{size(ours)} instead of {size(flat[SHUFFLED])}",
        ),
        Tile(
            f"{ratio(total.num_lookups, total.num_lookups_dedup)} x",
            "fewer embedding look-ups",
            f"{count(total.num_lookups_dedup)} instead of {count(total.num_lookups)}",
        ),
        Tile(
            percent(total.hit_rate),
            "cache hit rate, planned",
            f"with {percent(total.peak_cache_rows / total.num_unique_rows)} of the touched rows",
        ),
    ]
    pair = speed_up(runs)
    if pair:
        fast, slow = (r.summary for r in pair)
        shown.append(
            Tile(
                f"{ratio(fast.samples_per_sec, slow.samples_per_sec)} x",
                "faster training",
                f"{count(fast.samples_per_sec)} instead of {count(slow.samples_per_sec)} samples/s",
            )
        )
    scored = [r.summary for r in runs if r.summary.auc is not None and r.summary.ne is not None]
    if scored:
        shown.append(Tile(f"{scored[0].auc:.4f}", "AUC, held-back range", f"NE {scored[0].ne:.4f}"))
    return shown
