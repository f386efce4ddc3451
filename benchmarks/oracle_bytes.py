"""Bytes of access lists and indexes of shipped jobs, beside those of their datasets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.logs import build_job, job_path, raw_log
from pipelines.report.storage import dataset_bytes
from pipelines.table.indexes import add_index
from pipelines.table.segment import sum_bytes
from schemas.dataset import open_dataset

BATCH_SAMPLES = 8_192
GOALS = {"kuairand": 0.10, "demo": 0.25, "mind": None}
"""Shipped job to the share of the dataset that access lists and index may take."""
GOAL_BYTES_PER_ENTRY = 2.5


def measure_bytes(name: str, shared_data: Path, scratch: Path) -> dict[str, Any] | None:
    """Build a shipped job and index it at `BATCH_SAMPLES`; None where its log is missing.

    Args:
        name: of the job.
        shared_data: directory of logs.
        scratch: directory to build in.
    """
    log = raw_log(name, shared_data, scratch)
    if log is None:
        return None
    build_job(job_path(name), log, scratch / "dataset")
    dataset = open_dataset(scratch / "dataset")
    block = dataset.job.data.block_samples
    order = dataset.order(-(-BATCH_SAMPLES // block) * block, 1, "none", 0)
    dataset = add_index(dataset, order, [], "benchmark")
    index = dataset.index_for(order)
    found = {
        part: sum(sum_bytes(list(s.files.values()), f"{part}/") for s in dataset.segments)
        for part in ("access", "edges")
    }
    entries = sum(index.manifest.num_accesses.values())
    size = dataset_bytes(dataset)
    together = found["access"] + index.manifest.oracle_bytes
    return {
        "batch_samples": index.manifest.batch_samples,
        "entries": entries,
        "dataset": size,
        **found,
        "index": index.manifest.oracle_bytes,
        "bytes_per_entry": round(together / entries, 3),
        "goal_bytes_per_entry": GOAL_BYTES_PER_ENTRY,
        "share_of_dataset": round(together / size, 4),
        "goal_share": GOALS[name],
        "share_with_edges": round((together + found["edges"]) / size, 4),
    }
