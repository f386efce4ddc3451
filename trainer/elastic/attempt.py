"""Settings of an attempt, which its launcher writes for the replicas."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field

from presage.schemas.dataset.manifest import canonical_json
from presage.schemas.errors import SchemaError
from presage.schemas.run.records import RENDEZVOUS
from presage.schemas.storage.location import Location
from presage.schemas.typed_values import from_json
from presage.trainer.elastic.shared_rows import SharedStores
from presage.trainer.run.output import read_run_object
from presage.trainer.run.setup import Rollbacks
from presage.trainer.steps import DatasetExtent

TOKEN = "token"
"""File of the run with the token of its replicas."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendezvous:
    """Settings of one attempt at a run, written by the launcher for its replicas."""

    job: str
    """Path or URL of the job file."""
    dataset: str
    """Path or URL of the dataset."""
    lighthouse: str
    """`http://host:port`."""
    heartbeat_sec: float
    """Time without heartbeat after which a replica is considered dead."""
    embedding: str
    """Value of `--embedding`."""
    expanded: bool
    """Whether to undo the deduplication."""
    steps: int | None
    """Stop before this step."""
    follow: bool
    """Whether to wait for new segments."""
    extent: DatasetExtent
    """The part of the dataset that is agreed on at the start."""
    buffer_bytes: int
    """Size of the write buffer in front of the stores."""
    copy_bytes: int
    """Size of the largest copy for a checkpoint; 0 if none is made beside training."""
    shared: SharedStores | None
    """Stores of the run; None if every replica has all rows in memory."""
    attempt: str
    """Unique id; that of `RunManifest.attempt` at a URL."""
    rollbacks: Rollbacks = field(default_factory=Rollbacks)
    """Rollbacks of the run before this attempt."""


def write_rendezvous(run: Location, rendezvous: Rendezvous) -> None:
    """Write the settings of an attempt into the folder or to the URL of the run."""
    (run / RENDEZVOUS).write_bytes(_encode(rendezvous))


def _encode(rendezvous: Rendezvous) -> bytes:
    return canonical_json(asdict(rendezvous)).encode()


def read_rendezvous(run: Location) -> Rendezvous:
    """Return what `write_rendezvous` wrote.

    Raises:
        SchemaError: the run has no launcher, or the file is of another release.
        StorageError: the store failed.
    """
    path = run / RENDEZVOUS
    try:
        return from_json(Rendezvous, json.loads(path.read_text()))
    except (OSError, ValueError) as error:
        raise SchemaError(
            f"run cannot be joined by replicas: {error}; start it with "
            "python -m presage.trainer train --replicas 0",
            file=str(path),
        ) from error


def remove_rendezvous(run: Location, rendezvous: Rendezvous) -> None:
    """Remove the settings of an attempt, unless another launcher has written its own."""
    if read_run_object(run, RENDEZVOUS) == _encode(rendezvous):
        run.remove([RENDEZVOUS])
