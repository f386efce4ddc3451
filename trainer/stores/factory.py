"""The choice of a run's store, and the store processes that a run may use.

Store processes (`train.stores`, or `--stores` on this machine) hold all rows outside the trainer.
Without them `--embedding` chooses:

- `plain`: memory
- `uncached` and `lru`: mapped files
- `cached`: what `train.cache.files` names

A new kind of store implements `stores.store.Store`, is opened in `open_store`, and is a value of
`train.cache.files`.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from presage.schemas.config.train import StoresConfig, TrainConfig
from presage.schemas.dataset.files import replace_bytes
from presage.schemas.dataset.manifest import canonical_json
from presage.schemas.errors import SchemaError
from presage.schemas.paths import resolve_beside
from presage.schemas.run.records import STORE_OWNER
from presage.schemas.storage.location import Location
from presage.trainer.stores.future_log import log_store
from presage.trainer.stores.local import memory_store, mmap_store
from presage.trainer.stores.remote.client import open_remote_store
from presage.trainer.stores.remote.connection import Access, read_access
from presage.trainer.stores.remote.processes import TOKEN, StoreProcesses
from presage.trainer.stores.store import Store, TableLayout

STORE = "store"
"""Folder of the run for rows outside of memory."""

FILE_STORES: Mapping[str, Callable[[Mapping[str, TableLayout], Path], Store]] = {
    "log": log_store,
    "mmap": mmap_store,
}
"""By value of `train.cache.files`: returns an empty store in a folder."""


@contextmanager
def open_store(
    run: Path,
    layouts: Mapping[str, TableLayout],
    config: TrainConfig,
    *,
    job: Path | Location,
    embedding: str,
    num_processes: int | None,
) -> Iterator[Store]:
    """Open the empty store of a run and close it at the end.

    Args:
        run: run folder.
        layouts: tables by name.
        config: train section of the job.
        job: job file, to which paths in `config` are relative.
        embedding: value of `--embedding`; `plain` ignores store processes.
        num_processes: store processes to start here instead of those of the job.

    Raises:
        SchemaError: a store process cannot be reached or refuses.
    """
    with ExitStack() as stack:
        if embedding == "plain":
            store: Store = memory_store(layouts)
        elif num_processes or config.stores.addresses:
            addresses, token = config.stores.addresses, None
            if num_processes:
                processes = StoreProcesses(num_processes, run / STORE)
                addresses = stack.enter_context(processes).addresses
                token = run / STORE / TOKEN
            store = open_remote_store(
                addresses,
                store_access(config.stores, job, token),
                layouts,
                owner=run_owner(run),
                session=secrets.token_hex(8),
            )
        else:
            # only a cache with a plan knows the next use of each row, by which the log is ordered
            files = config.cache.files if embedding == "cached" else "mmap"
            store = FILE_STORES[files](layouts, run / STORE)
        stack.callback(store.close)
        yield store


def token_file_of(config: StoresConfig, job: Path | Location) -> Path:
    """Return the token file of the job's store processes.

    Raises:
        SchemaError: it is at a URL, where others could read it.
    """
    path = resolve_beside(job, str(config.token_file))
    if isinstance(path, Location):
        raise SchemaError(
            f"train.stores.token_file must be a local path, got {path}; write an absolute path",
            file=str(job),
        )
    return path


def store_access(
    config: StoresConfig, job: Path | Location, token_file: Path | None = None
) -> Access:
    """Return the address settings and credentials of store processes.

    Args:
        config: of the job.
        job: job file, to which paths in `config` are relative.
        token_file: of the store processes; None: that of the job.

    Raises:
        SchemaError: the file has no token.
    """
    authorities = config.certificates
    access = read_access(
        token_file or token_file_of(config, job),
        None if authorities is None else resolve_beside(job, authorities),
        config.certificate_name,
    )
    return replace(access, timeout_sec=config.timeout.total_seconds())


def run_owner(run: Path) -> str:
    """Return the id of a run for store processes, created on first use."""
    path = run / STORE_OWNER
    if not path.is_file():
        replace_bytes(path, canonical_json({"owner": secrets.token_hex(8)}).encode())
    return str(json.loads(path.read_text(encoding="utf-8"))["owner"])
