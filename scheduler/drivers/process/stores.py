"""Stores of a job: their folders, addresses and token, and the job file that names them."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import yaml

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


def prepare_stores(place: Workplace, numbers: Sequence[int], reach: Reach | None = None) -> None:
    """Write the job file with the addresses of stores, unless it says the same already.

    Each address is a file in which its store says where it listens, wherever it is started again.

    Args:
        place: of the job.
        numbers: of the stores that have slots.
        reach: how processes reach each other; None where all share one loopback.
    """
    place.stores.mkdir(parents=True, exist_ok=True)
    found: dict[str, object] = {"addresses": [address_of(place, number) for number in numbers]}
    if reach is None:
        found["token_file"] = str(_with_token(place))
    else:
        found |= {"token_file": reach.token, "certificates": reach.chain}
        found["certificate_name"] = reach.name
    body: Any = yaml.safe_load(place.job_file.read_text(encoding="utf-8"))
    schema = load_job(place.job_file).data.schema
    body["data"]["schema"] = str((place.job_file.parent / schema).resolve())
    train = body["train"] = body.get("train") or {}
    kept = {k: v for k, v in (train.get("stores") or {}).items() if k in ("timeout", "replicas")}
    train["stores"] = {**kept, **found, "elastic": True}
    text = yaml.safe_dump(body, sort_keys=False).encode()
    if not place.served_job.exists() or place.served_job.read_bytes() != text:
        replace_bytes(place.served_job, text)


def _with_token(place: Workplace) -> Path:
    """Return the file of the token that stores of one loopback ask for; written once."""
    token = token_of(place)
    if not token.exists():
        new = token.with_suffix(".new")
        new.touch(mode=0o600)
        new.write_text(secrets.token_hex(32) + "\n")
        new.replace(token)
    return token


def discard_stores(place: Workplace, numbers: Collection[int]) -> None:
    """Remove what stores left that have no slots any more and run no more.

    Above all their addresses, which another store may come to listen at.

    Args:
        place: of the job.
        numbers: of the stores that belong to it.
    """
    for folder in place.stores.iterdir() if place.stores.is_dir() else ():
        if folder.is_dir() and folder.name.isdigit() and int(folder.name) not in numbers:
            (folder / STORE_ADDRESS).unlink(missing_ok=True)
            shutil.rmtree(folder, ignore_errors=True)  # it may be written yet


def store_folder(place: Workplace, number: int) -> Path:
    """Return where the log of a store lies."""
    return place.stores / str(number)


def token_of(place: Workplace) -> Path:
    """Return the file with what stores of one loopback ask for."""
    return place.stores / "token"


def address_of(place: Workplace, number: int) -> str:
    """Return the address of a store; it stays when the store is started again."""
    return f"file://{store_folder(place, number) / STORE_ADDRESS}"


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
