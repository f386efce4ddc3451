"""Stores of a job: their folder, addresses and token, and the job file that names them."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any

import yaml

from scheduler.drivers.process.ports import free_ports
from scheduler.drivers.process.workplace import Workplace
from scheduler.drivers.processes import Reach
from scheduler.lookahead import look_ahead
from scheduler.machine.events import LoadKnown
from schemas.accesses import index_load
from schemas.dataset import open_dataset
from schemas.errors import SchemaError
from schemas.events import STORE_ADDRESS
from schemas.job import load_job
from schemas.manifest import replace_bytes


def prepare_stores(place: Workplace, count: int, reach: Reach | None = None) -> None:
    """Choose addresses, and write the job file that has them, once.

    It is written last, so that half of it all is done again; and anew for another platform.

    Args:
        place: of the job.
        count: stores.
        reach: how processes reach each other; None where all share one loopback.
    """
    if place.served_job.exists():
        known = load_job(place.served_job).train.stores
        if (None if reach is None else reach.name) == known.certificate_name:
            return
    place.stores.mkdir(parents=True, exist_ok=True)
    found = _on_loopback(place, count) if reach is None else _by_files(place, count, reach)
    body: Any = yaml.safe_load(place.job_file.read_text(encoding="utf-8"))
    schema = load_job(place.job_file).data.schema
    body["data"]["schema"] = str((place.job_file.parent / schema).resolve())
    train = body["train"] = body.get("train") or {}
    kept = {k: v for k, v in (train.get("stores") or {}).items() if k in ("timeout", "replicas")}
    train["stores"] = {**kept, **found}
    replace_bytes(place.served_job, yaml.safe_dump(body, sort_keys=False).encode())


def _on_loopback(place: Workplace, count: int) -> dict[str, object]:
    """Return ports that are free now, and a new token."""
    token = token_of(place)
    token.touch(mode=0o600)
    token.write_text(secrets.token_hex(32) + "\n")
    addresses = [f"grpc://127.0.0.1:{port}" for port in free_ports(count)]
    return {"addresses": addresses, "token_file": str(token)}


def _by_files(place: Workplace, count: int, reach: Reach) -> dict[str, object]:
    """Return the files in which stores say where they are, wherever they are started again."""
    folders = [store_folder(place, number) for number in range(count)]
    return {
        "addresses": [f"file://{folder / STORE_ADDRESS}" for folder in folders],
        "token_file": reach.token,
        "certificates": reach.chain,
        "certificate_name": reach.name,
    }


def store_folder(place: Workplace, number: int) -> Path:
    """Return where the log of a store lies."""
    return place.stores / str(number)


def token_of(place: Workplace) -> Path:
    """Return the file with what stores of one loopback ask for."""
    return place.stores / "token"


def address_of(place: Workplace, number: int) -> str:
    """Return the address of a store; it stays when the store is started again."""
    return load_job(place.served_job).train.stores.addresses[number]


def load_known(place: Workplace, job: str, time_sec: float) -> LoadKnown | None:
    """Return what the oracle tells of the steps that are known, None without an index of the job.

    Args:
        place: of the job.
        job: its name.
        time_sec: the time.
    """
    batch = load_job(place.job_file).train.batch_samples
    try:
        dataset = open_dataset(place.dataset)
    except SchemaError:
        return None  # damaged: the trainer says so, with all that it knows
    ids = tuple(segment.manifest.id for segment in dataset.segments)
    same = [
        index
        for index in dataset.indexes
        if index.manifest.batch_samples == batch and index.manifest.segments == ids
    ]
    if not same:
        return None
    index, found = same[0], same[0].manifest
    order = dataset.order(batch, found.epochs, found.shuffle, found.seed)
    loads = [index_load(dataset, table, order) for table in dataset.job.data.tables]
    slots = sum(load.slots for load in loads)
    assert not isinstance(slots, int), "a job has a table"
    distances = (
        (steps[step] for step in range(len(steps)))
        for steps in map(index.steps, dataset.job.data.tables)
    )
    touched = look_ahead(distances, load_job(place.job_file).train.cache).touched_rows
    ends = [(period + 1) * len(touched) // len(slots) - 1 for period in range(len(slots))]
    return LoadKnown(
        time_sec=time_sec,
        job=job,
        num_steps=order.num_steps,
        slots=tuple(tuple(row) for row in slots.tolist()),
        touched_rows=tuple(touched[ends].tolist()),
    )
