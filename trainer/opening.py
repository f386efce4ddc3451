"""Where the rows of a run lie, from its start to its end."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from schemas.job_train import StoresConfig
from schemas.manifest import canonical_json, replace_bytes
from trainer.checkpoint import stores_of
from trainer.stores.flight_client import open_group
from trainer.stores.future_log import FutureLog, log_stores
from trainer.stores.memory import memory_store
from trainer.stores.mmap import mmap_store
from trainer.stores.peer import Access
from trainer.stores.processes import TOKEN, LocalStores
from trainer.stores.store import Store, TableLayout
from trainer.stores.together import close_stores, group_of
from trainer.stores.token import read_token

STORE = "store"
"""Folder of the run for rows outside memory."""
OWNER = "store.json"
"""File of the run with the name that its store processes know it by."""


@contextmanager
def open_stores(
    run: Path,
    layouts: Mapping[str, TableLayout],
    config: StoresConfig,
    *,
    job: Path,
    kind: Literal["memory", "mmap", "log"],
    num_processes: int | None,
) -> Iterator[dict[str, Store]]:
    """Open empty stores of all tables; what they hold open is given back at the end.

    Args:
        run: run folder.
        layouts: tables by name.
        config: store processes of the job, for rows that are not all in memory.
        job: job file; its paths are relative to it.
        kind: where rows lie without store processes; `memory` holds with them, too.
        num_processes: store processes to be started here, in the place of those of the job.

    Raises:
        SchemaError: a store refuses or cannot be reached.
    """
    if kind == "memory":
        yield {table: memory_store(layout) for table, layout in layouts.items()}
    elif num_processes:
        with LocalStores(num_processes, run / STORE, replicas=config.replicas) as local:
            access = access_of(config, job.parent, local.directory / TOKEN)
            with _opened(run, layouts, tuple(local.addresses), access, config.replicas) as stores:
                yield stores
    elif config.addresses:
        access = access_of(config, job.parent, job.parent / str(config.token_file))
        with _opened(run, layouts, config.addresses, access, config.replicas) as stores:
            yield stores
    elif kind == "log":
        yield dict(log_stores(layouts, run / STORE))
    else:
        yield {table: mmap_store(layout, run / STORE) for table, layout in layouts.items()}


def readable(stores: Mapping[str, Store], checkpoint: Path | None) -> dict[str, Store]:
    """Return stores that give any row after training.

    Args:
        stores: of the run.
        checkpoint: the newest; read in the place of a log, which gives rows by their step only.
    """
    if checkpoint is None or not isinstance(group_of(stores), FutureLog):
        return dict(stores)
    return stores_of(checkpoint, stores)


@contextmanager
def _opened(
    run: Path,
    layouts: Mapping[str, TableLayout],
    addresses: tuple[str, ...],
    access: Access,
    replicas: int,
) -> Iterator[dict[str, Store]]:
    session = secrets.token_hex(8)
    group = open_group(
        addresses,
        access,
        layouts,
        owner=owner_of(run),
        session=session,
        reset=True,
        replicas=replicas,
    )
    stores: dict[str, Store] = dict(group)
    try:
        yield stores
    finally:
        close_stores(stores)


def access_of(config: StoresConfig, folder: Path, token_file: Path) -> Access:
    """Return how store processes are reached.

    Args:
        config: of the job.
        folder: of the job file, which its paths are relative to.
        token_file: with what they ask for.

    Raises:
        SchemaError: there is no token in the file.
    """
    trusted = config.certificates
    return Access(
        token=read_token(token_file),
        certificates=None if trusted is None else (folder / trusted).read_bytes(),
        certificate_name=config.certificate_name,
        timeout_sec=config.timeout.total_seconds(),
        elastic=config.elastic,
    )


def owner_of(run: Path) -> str:
    """Return the name of a run, given once and kept beside it."""
    path = run / OWNER
    if not path.is_file():
        replace_bytes(path, canonical_json({"owner": secrets.token_hex(8)}).encode())
    return str(json.loads(path.read_text(encoding="utf-8"))["owner"])
