"""The report page: one HTML file without scripts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from string import Template

from pipelines.report.dedup import dedup_section, groups_section
from pipelines.report.html import (
    Section,
    Tile,
    command_table,
    count,
    digits,
    escape,
    paragraph,
    percent,
    ratio,
    sections,
    size,
    tiles,
)
from pipelines.report.oracle import OracleFacts, oracle_facts, oracle_section
from pipelines.report.quality import event_sections, gate_section, sampling_sections
from pipelines.report.runs import (
    BUILD,
    PLAN,
    Run,
    pools_section,
    read_object,
    read_runs,
    speed_up,
    training_section,
)
from pipelines.report.storage import SHUFFLED, flat_bytes, flat_rows, folder_bytes, storage_section
from pipelines.table.indexes import TableReport
from pipelines.table.rows import row_groups
from schemas.dataset import Dataset, open_dataset
from schemas.errors import SchemaError
from schemas.files import replace_bytes
from schemas.run_log import SUMMARY


def facts(dataset: Dataset) -> str:
    """Return the line of sizes below the heading."""
    manifests = [s.manifest for s in dataset.segments]
    samples = sum(m.num_samples for m in manifests)
    sessions = sum(m.num_sessions for m in manifests)
    splits = {name: 0 for m in manifests for name in sorted(m.splits, reverse=True)}
    for manifest in manifests:
        for name, (_, num_blocks) in manifest.splits.items():
            splits[name] += num_blocks
    blocks = ", ".join(f"{count(number)} {name}" for name, number in splits.items())
    parts = [
        f"{count(samples)} samples in {count(sessions)} sessions "
        f"({digits(samples / sessions)} per session)",
        f"{count(sum(splits.values()))} blocks of {count(dataset.job.data.block_samples)} "
        f"({blocks})",
        f"{len(manifests)} {'segment' if len(manifests) == 1 else 'segments'}",
        f"{count(sum(m.num_rejects for m in manifests))} rejects",
        f"raw input {size(sum(m.input_bytes for m in manifests))}",
        *_forgotten(dataset),
    ]
    return paragraph("; ".join(parts), "facts")


def _forgotten(dataset: Dataset) -> list[str]:
    """Say how many samples count no more; nothing when all do."""
    found = sum(
        len(segment.deleted_rows(file_index, row_group))
        for segment in dataset.segments
        if segment.tombstones.num_rows
        for file_index, row_group in row_groups(segment)
    )
    return [f"{count(found)} samples forgotten, of weight 0 until they are rewritten"] * bool(found)


def headline(
    dataset: Dataset, flat: Mapping[str, float], oracle: OracleFacts | None, runs: Sequence[Run]
) -> list[Tile]:
    """Return the headline numbers; what was not measured is left out.

    Args:
        dataset: an open dataset.
        flat: baseline to bytes.
        oracle: what the oracle knows, or None.
        runs: finished runs.
    """
    ours, plain = folder_bytes(dataset), flat[SHUFFLED]
    smaller = ours <= plain
    shown = [
        Tile(
            f"{ratio(plain, ours) if smaller else ratio(ours, plain)} x",
            "smaller than shuffled Parquet" if smaller else "as large as shuffled Parquet",
            f"{size(ours)}, oracle apart, instead of {size(plain)}",
        )
    ]
    if oracle:
        shown.extend(_oracle_tiles(oracle.total))
    return shown + _run_tiles(runs)


def _oracle_tiles(total: TableReport) -> list[Tile]:
    return [
        Tile(
            f"{ratio(total.num_lookups, total.num_lookups_dedup)} x",
            "fewer look-ups",
            f"{count(total.num_lookups_dedup)} instead of {count(total.num_lookups)}",
        ),
        Tile(
            percent(total.hit_rate),
            "planned cache hit rate",
            f"holding {percent(total.peak_cache_rows / total.num_unique_rows)} of the touched rows",
        ),
    ]


def _run_tiles(runs: Sequence[Run]) -> list[Tile]:
    shown: list[Tile] = []
    pair = speed_up(runs)
    if pair:
        fast, slow = (r.summary.samples_per_sec for r in pair)
        detail = f"{count(fast)} instead of {count(slow)} samples/s"
        label = "faster training" if fast > slow else "training speed"
        shown.append(Tile(f"{ratio(fast, slow)} x", label, detail))
    for run in runs[:1]:
        if run.summary.auc is not None and run.summary.ne is not None:
            detail = f"NE {run.summary.ne:.4f}, run {run.name}"
            shown.append(Tile(f"{run.summary.auc:.4f}", "AUC, held-back range", detail))
    return shown


_ALWAYS = (
    (
        "samples, sessions, dedup factors, bytes",
        "read from the manifests that the build wrote, whose hashes were verified; recomputed by",
        "python -m pipelines verify DATASET",
    ),
    (
        "bytes of plain Parquet",
        "the expanded samples written again in each order, zstd level 3, pyarrow's defaults but "
        "for the file with the best encodings; the same rows as",
        "python -m pipelines expand DATASET --output FILE.parquet",
    ),
    (
        "tuples added by block edges",
        "the tuples of each group deduplicated once more over a whole part",
        "python -m pipelines report DATASET --html FILE.html",
    ),
    (
        "how often features change, what RecD expects, bytes of groups",
        "samples compared with the one before in their session; the columns of each group written "
        "once more as one row per sample, best encodings",
        "python -m pipelines report DATASET --html FILE.html",
    ),
    (
        "findings, distances, sessions by segment",
        "statistics.pbtxt.zst and anomalies.pbtxt of each segment; written by",
        "python -m pipelines append JOB --dataset DATASET --input LOG",
    ),
    (
        "look-ups, accesses, hit rate, peak cache rows",
        "the job's plan run over the index of the dataset; printed by",
        "python -m pipelines oracle DATASET --json",
    ),
    (
        "cache-size curve",
        "the same accesses; LRU by stack distances (Mattson), best possible by Belady's rule",
        "python -m pipelines report DATASET --html FILE.html",
    ),
)
_RUNS = (
    "speed, loss, phases, NE, AUC, memory",
    "metrics.jsonl and summary.json of each run, written by",
    "python -m trainer train JOB --dataset DATASET --output RUN [--expanded] [--embedding cached]",
)
_PLAN = (
    "sizes of both pools, reasons",
    "plan.json beside the runs, printed by",
    "python -m scheduler plan JOB --dataset DATASET --history RUNS --json",
)
_BUILD = (
    "time of the build",
    "build.json beside the runs, printed by",
    "python -m pipelines build JOB --input LOG --output DATASET --json",
)


def method_section(dataset: Dataset, runs: list[Run], has_plan: bool, has_build: bool) -> Section:
    """Return the section about where the numbers come from."""
    rows = [*_ALWAYS]
    rows += [_RUNS] * bool(runs) + [_PLAN] * has_plan + [_BUILD] * has_build
    ids = ", ".join(r.id for r in (*dataset.manifest.segments, *dataset.manifest.indexes))
    return Section(
        "method",
        "How each number was obtained",
        f"Everything above comes from the files of this dataset ({ids}) and of the runs beside it; "
        "the same files give the same page, byte for byte.",
        command_table("Numbers and the commands behind them", rows),
    )


# A page about a dataset and the runs that were trained on it: one file, no scripts.
#
# manifests, expanded rows, index, runs -> facts -> one section each -> template.

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
