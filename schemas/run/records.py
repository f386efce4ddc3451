"""Files of a run: step metrics, ledger, splits and summary; decisions of the scheduler."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from presage.schemas.dataset.manifest import canonical_json
from presage.schemas.errors import SchemaError
from presage.schemas.typed_values import from_json

T = TypeVar("T")
METRICS = "metrics.jsonl"
LEDGER = "ledger.jsonl"
SUMMARY = "summary.json"
RUN_FILE = "run.json"
"""File with the inputs and settings of a run."""
CHECKPOINTS = "checkpoints"
"""Folder of checkpoints, each a folder named by its step."""
CHECKPOINT_LOG = "checkpoints.jsonl"
"""File with a line for each checkpoint that was due, saved or skipped."""
STORE_OWNER = "store.json"
"""File with the id under which store processes hold the rows of a run."""
STORE_ADDRESS = "address"
"""File with the address of a store, in its folder."""
RENDEZVOUS = "rendezvous.json"
"""File with the rendezvous of a run's replicas."""
EXIT_HUNG, EXIT_BEHIND, EXIT_LOST_ROWS = 4, 75, 76
"""Exit statuses of trainers that are worth a retry: a phase exceeded its time limit, a replica fell
too far behind the others or another attempt trains its run, or a store lost rows."""
PHASES = ("read", "wait", "fetch", "forward", "backward", "sync", "update")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMetric:
    """One committed step: one line of `metrics.jsonl`."""

    step: int
    """Position in the run, from 0."""
    loss: float
    """Mean loss per unit of sample weight, before the update."""
    num_samples: int
    num_replicas: int
    """Replicas that computed it."""
    samples_per_sec: float
    """Samples over the wall time of the step, without waiting for the pipeline."""
    phases: Mapping[str, float]
    """Seconds by phase: read, wait (for the pipeline, with --follow), fetch, forward, backward,
    sync, update."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerEntry:
    """Blocks that one replica trained in one committed step: one line of `ledger.jsonl`."""

    step: int
    epoch: int
    segment: str
    replica: str
    """Replica that computed them."""
    blocks: tuple[int, ...]
    """Ids of the blocks whose first samples it computed, in batch order."""
    num_samples: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """A finished run: `summary.json`, and what `train --json` prints."""

    num_steps: int
    """Committed steps."""
    num_samples: int
    """Samples trained, every epoch counted."""
    loss_first: float
    loss_last: float
    ne: float | None
    """Normalised entropy on the evaluation split; None without one."""
    auc: float | None
    gauc: float | None
    """AUC within each group, averaged by the weight of samples, on the evaluation split."""
    samples_per_sec: float
    """Samples over the wall time of all steps but the first."""
    cache_hit_rate: float | None
    """1 - fetched_rows / accesses; None without a cache."""
    fetched_rows: int
    """Rows read from the store."""
    peak_rss_bytes: int
    """Largest resident memory of the process."""
    session_auc: float | None = None
    """AUC within each session, averaged by the weight of samples, on the evaluation split."""
    calibration: float | None = None
    """Sum of predictions over sum of labels, weighted, on the evaluation split."""
    auc_error: float | None = None
    """Largest error of `auc` besides rounding; 0 up to a million distinct scores."""
    embedding: str = "plain"
    """Embedding mode: plain, cached, lru or uncached."""
    expanded: bool = False
    """Whether samples were trained without deduplication."""
    num_rollbacks: int = 0
    """Rollbacks to a checkpoint after a store had lost rows."""
    recomputed_steps: int = 0
    """Committed steps that were trained again after rollbacks."""
    fast: bool = False
    """Whether fast mode was used, which is not bit-identical to the default mode."""
    start: Mapping[str, Any] | None = None
    """Warm start: `run`, `train_step`, `checkpoint_sha256`, the ids of the run's `segments`, and by
    table the number of `new`, `kept` and `dropped` rows and of ids it has `grown` by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """A decision of the scheduler and its reason: a line of its log."""

    time_sec: float
    """Seconds since the epoch, given by the caller."""
    job: str
    action: str
    process: str = ""
    """Process that it concerns, if any."""
    reason: str
    values: Mapping[str, float] = field(default_factory=dict)


def to_line(record: StepMetric | LedgerEntry | Decision | RunSummary) -> str:
    """Return a record as one line of JSON, without the newline."""
    return canonical_json(asdict(record))


def read_metrics(path: Path) -> list[StepMetric]:
    """Read `metrics.jsonl`; raises as `read_lines`."""
    return read_lines(path, lambda body: from_json(StepMetric, body), "a step metric")


def read_lines(path: Path, parse: Callable[[Any], T], what: str) -> list[T]:
    """Read a file of JSON lines; an incomplete last line is skipped.

    `what` is the noun for a line, with its article, for errors.

    Raises:
        SchemaError: a line other than the last is invalid.
    """
    records: list[T] = []
    lines = path.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, start=1):
        try:
            records.append(parse(json.loads(line)))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            if number == len(lines):
                break
            raise SchemaError(
                f"line is not {what}: {line[:80]!r} ({error!r}); restore the file",
                file=str(path),
                location=str(number),
            ) from error
    return records


def read_summary(path: Path) -> RunSummary:
    """Read `summary.json`.

    Raises:
        SchemaError: the file is missing or invalid.
    """
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
        return from_json(RunSummary, body, use_defaults=True)
    except (OSError, ValueError) as error:
        raise SchemaError(
            f"summary of a finished run cannot be read: {error}; train again", file=str(path)
        ) from error
