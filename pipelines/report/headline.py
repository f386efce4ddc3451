"""The head of the page: what the dataset is, and a row of numbers that sum the page up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pipelines.oracle.policies import TableReport
from pipelines.parts.expand import row_groups
from pipelines.report.baselines import SHUFFLED
from pipelines.report.html import Tile, paragraph
from pipelines.report.numbers import count, digits, percent, ratio, size
from pipelines.report.oracle import OracleFacts
from pipelines.report.runs import Run, speed_up
from pipelines.report.storage import folder_bytes
from schemas.dataset import Dataset


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
        len(segment.forgotten_rows(file_index, row_group))
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
