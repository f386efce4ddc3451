"""Stores of a job: their folder, addresses and token, and the job file that names them."""

from __future__ import annotations

import secrets
import socket
from contextlib import ExitStack
from typing import Any

import yaml

from scheduler.drivers.process.workplace import Workplace
from scheduler.lookahead import look_ahead
from scheduler.machine.events import LoadKnown
from schemas.accesses import index_load
from schemas.dataset import open_dataset
from schemas.errors import SchemaError
from schemas.job import load_job
from schemas.manifest import replace_bytes


def prepare_stores(place: Workplace, count: int) -> None:
    """Choose addresses and a token, and write the job file that has them, once.

    The file is written last, so that half of it all is done again.
    """
    if place.served_job.exists():
        return
    place.stores.mkdir(parents=True, exist_ok=True)
    token = place.stores / "token"
    token.touch(mode=0o600)
    token.write_text(secrets.token_hex(32) + "\n")
    body: Any = yaml.safe_load(place.job_file.read_text(encoding="utf-8"))
    schema = load_job(place.job_file).data.schema
    body["data"]["schema"] = str((place.job_file.parent / schema).resolve())
    train = body["train"] = body.get("train") or {}
    addresses = [f"grpc://127.0.0.1:{port}" for port in _free_ports(count)]
    kept = {k: v for k, v in (train.get("stores") or {}).items() if k in ("timeout", "replicas")}
    train["stores"] = {**kept, "addresses": addresses, "token_file": str(token)}
    replace_bytes(place.served_job, yaml.safe_dump(body, sort_keys=False).encode())


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


def _free_ports(count: int) -> list[int]:
    """Return ports of loopback that nobody listens on now."""
    with ExitStack() as opened:
        sockets = [opened.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
