"""The lines that a run writes: step metrics, ledger, summary, decisions."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from schemas.errors import SchemaError
from schemas.manifest import canonical_json

T = TypeVar("T")
METRICS = "metrics.jsonl"
LEDGER = "ledger.jsonl"
SPLITS = "splits.jsonl"
SUMMARY = "summary.json"
RUN_FILE = "run.json"
"""File that says what a run was begun with."""
CHECKPOINTS = "checkpoints"
"""Folder of a run with a folder for each checkpoint, named by its step."""
STORE_ADDRESS = "address"
"""File in the folder of a store that says where it listens."""
RENDEZVOUS = "together.json"
"""File of a run that replicas may join."""
EXIT_HUNG, EXIT_BEHIND, EXIT_LOST_ROWS = 4, 75, 76
"""Exit statuses of trainers after which another attempt may get further: a phase that did not end,
a replica that fell too far behind the others, and a store that lost rows."""
PHASES = ("read", "wait", "fetch", "forward", "backward", "sync", "update")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMetric:
    """One committed step: one line of `metrics.jsonl`."""

    step: int
    """Position in the run, from 0."""
    loss: float
    """Mean loss per unit of sample weight, before the update."""
    num_samples: int
    """Samples of the batch."""
    num_replicas: int
    """Replicas that computed it."""
    samples_per_sec: float
    """Samples over the wall time of the step, waiting for the pipeline left out."""
    phases: Mapping[str, float]
    """Seconds by phase: read, wait (for the pipeline, when a run follows it), fetch, forward,
    backward, sync, update."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerEntry:
    """Blocks that one replica trained in one committed step: one line of `ledger.jsonl`."""

    step: int
    """Position in the run, from 0."""
    epoch: int
    """Pass over the training range."""
    segment: str
    """Segment id."""
    replica: str
    """Who computed them."""
    blocks: tuple[int, ...]
    """Block ids, in batch order."""
    num_samples: int
    """Samples in them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSplit:
    """Who is to compute which leaves of a step: one line of `splits.jsonl`, where it changes."""

    step: int
    """The first step that is split so; a later line for the same step replaces this one."""
    fixed_at: int
    """The step whose agreement fixed it."""
    leaves: Mapping[str, tuple[int, int]]
    """By replica its first leaf, and one after the last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """A finished run: `summary.json`, and what `train --json` prints."""

    num_steps: int
    """Committed steps."""
    num_samples: int
    """Samples trained, every epoch counted."""
    loss_first: float
    """Loss of the first step."""
    loss_last: float
    """Loss of the last step."""
    ne: float | None
    """Normalised entropy on the evaluation split; None when there is none."""
    auc: float | None
    """Area under the ROC curve on the evaluation split."""
    gauc: float | None
    """AUC per group, weighted by samples, on the evaluation split."""
    samples_per_sec: float
    """Samples over the wall time of all steps, the first one left out."""
    cache_hit_rate: float | None
    """1 - fetched_rows / accesses; None without a cache."""
    fetched_rows: int
    """Rows read from the store."""
    peak_rss_bytes: int
    """Largest resident memory of the process."""
    session_auc: float | None = None
    """AUC per session, weighted by samples, on the evaluation split."""
    calibration: float | None = None
    """Sum of predictions over sum of labels, weighted, on the evaluation split."""
    auc_error: float | None = None
    """The most that `auc` is off by, beside rounding; 0 up to a million distinct scores."""
    embedding: str = "plain"
    """How tables were held: plain, cached, lru or uncached."""
    expanded: bool = False
    """Whether deduplication was undone before training."""
    num_rollbacks: int = 0
    """Times that the run went back to a checkpoint, for a store had lost rows."""
    recomputed_steps: int = 0
    """Committed steps that were trained again after that."""
    fast: bool = False
    """Whether all samples of a step were computed at once, with bits of their own."""
    start: Mapping[str, Any] | None = None
    """What it began with: `run`, `train_step`, `checkpoint_sha256`, the ids of its own `segments`,
    and by table the rows that were `new`, `kept` and `dropped`, and the ids it has `grown` by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What the scheduler chose and why: a line of its log."""

    time_sec: float
    """Seconds since the epoch, given by the caller."""
    job: str
    """Job name."""
    action: str
    """What is done."""
    process: str = ""
    """With which process, where it is one."""
    reason: str
    """Why, in words and numbers."""
    values: Mapping[str, float] = field(default_factory=dict)
    """Numbers the reason speaks of."""


def to_line(record: StepMetric | LedgerEntry | StepSplit | Decision | RunSummary) -> str:
    """Return a record as one line of JSON, without the newline."""
    return canonical_json(asdict(record))


def read_metrics(path: Path) -> list[StepMetric]:
    """Read `metrics.jsonl`; a torn last line is left out.

    Raises:
        SchemaError: a line other than the last is no step metric.
    """
    return read_lines(
        path,
        lambda body: StepMetric(**body),
        lambda line, _: f"line must be a step metric, got {line!r}; restore the file",
    )


def read_lines(
    path: Path, record_of: Callable[[Any], T], refusal: Callable[[str, Exception], str]
) -> list[T]:
    """Read a file with a JSON object in each line; a torn last line is left out.

    Args:
        path: of the file.
        record_of: from an object to what it stands for.
        refusal: from the start of a line and what is wrong with it to the error's text.

    Raises:
        SchemaError: a line other than the last cannot be read.
    """
    records: list[T] = []
    lines = path.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, start=1):
        try:
            records.append(record_of(json.loads(line)))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            if number == len(lines):
                break
            raise SchemaError(
                refusal(line[:80], error), file=str(path), place=str(number)
            ) from error
    return records


def read_summary(path: Path) -> RunSummary:
    """Read `summary.json`.

    Raises:
        SchemaError: the file is missing or no summary.
    """
    try:
        return RunSummary(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise SchemaError(
            f"summary must be that of a finished run, got {error}; train again", file=str(path)
        ) from error
