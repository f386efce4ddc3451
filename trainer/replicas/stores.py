"""The store processes that all replicas of a run share: opened by the launcher, then by each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from schemas.job_train import StoresConfig
from trainer.checkpoint import load_rows, step_of, verified
from trainer.opening import STORE, access_of, open_stores, owner_of
from trainer.stores.flight_client import FlightGroup, FlightStore, open_group
from trainer.stores.processes import TOKEN
from trainer.stores.store import TableLayout
from trainer.stores.together import group_of


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedStores:
    """How replicas reach their stores."""

    addresses: tuple[str, ...]
    """Of the processes."""
    session: str
    """Names this attempt at the run: calls of an earlier one are refused."""
    token_file: str
    """What they ask for."""
    first: int
    """Step before which they had every row, when this attempt began."""


@contextmanager
def begin_stores(
    run: Path,
    job: Path,
    config: StoresConfig,
    layouts: Mapping[str, TableLayout],
    num_processes: int | None,
    checkpoint: Path | None,
) -> Iterator[SharedStores]:
    """Have stores with the rows of a checkpoint, for the replicas of a run.

    Args:
        run: run folder.
        job: job file.
        config: store processes of the job.
        layouts: tables by name.
        num_processes: store processes to be started here, in the place of those of the job.
        checkpoint: to begin with; None for the beginning.

    Raises:
        ValueError: there are no store processes.
        SchemaError: a store refuses or cannot be reached, or the checkpoint is damaged.
    """
    if not num_processes and not config.addresses:
        raise ValueError(
            "replicas that keep their rows outside memory must share store processes, got none; "
            "use --stores, or --embedding plain"
        )
    opened = open_stores(run, layouts, config, job=job, kind="mmap", num_processes=num_processes)
    with opened as stores:
        group = group_of(stores)
        assert isinstance(group, FlightGroup), "there are store processes"
        if checkpoint is not None:
            load_rows(checkpoint, verified(checkpoint, None), stores)
        token = run / STORE / TOKEN if num_processes else job.parent / str(config.token_file)
        yield SharedStores(
            addresses=tuple(group.members.addresses),
            session=group.members.session,
            # as it is named: where it leads to may differ from node to node
            token_file=str(token.absolute()),
            first=step_of(checkpoint),
        )


def open_shared(
    shared: SharedStores,
    run: Path,
    job: Path,
    config: StoresConfig,
    layouts: Mapping[str, TableLayout],
) -> dict[str, FlightStore]:
    """Open the stores of a run in one of its replicas.

    Args:
        shared: how they are reached.
        run: run folder.
        job: job file.
        config: store processes of the job.
        layouts: tables by name.

    Raises:
        SchemaError: a store refuses or cannot be reached.
    """
    return open_group(
        shared.addresses,
        access_of(config, job.parent, Path(shared.token_file)),
        layouts,
        owner=owner_of(run),
        session=shared.session,
        reset=False,
        replicas=config.replicas,
        repairs=False,
    )
