"""How each number of the page was obtained, one line each with the command."""

from __future__ import annotations

from pipelines.report.html import Section, command_table
from pipelines.report.runs import Run
from schemas.dataset import Dataset

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
