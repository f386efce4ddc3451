"""The command line of each kind of process."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from scheduler.controller.slots import initial_slots, slots_of_range
from scheduler.drivers.base import Reach
from scheduler.drivers.local.job_files import Workplace, address_of, store_folder, token_of
from schemas.hashing import NUM_SLOTS

_ROOT = Path(__file__).resolve().parents[3]


def environment() -> dict[str, str]:
    """Return this process's environment, in which our packages are found."""
    path = os.pathsep.join([str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path}


def generate_command(job_file: Path, output: Path) -> list[str]:
    """Return the command that writes a job's synthetic log."""
    return [*module("pipelines"), "generate", str(job_file), "--output", str(output)]


def segment_command(
    place: Workplace, number: int, workers: int, elsewhere: Sequence[str] = ()
) -> list[str]:
    """Return the command that builds a segment and enters it in its turn.

    Args:
        place: of the job.
        number: of the segment.
        workers: of Beam's local runner.
        elsewhere: Beam's options where another runner is to build it.
    """
    source = ["--input", str(place.segment(number)), "--json"]
    final = ["--final"] if number + 1 == place.num_segments else []
    build = [*module("pipelines"), "build", str(place.job_file), "--output", str(place.dataset)]
    append = [*module("pipelines"), "append", str(place.job_file), "--dataset", str(place.dataset)]
    turn = ["--position", str(number), "--in-order"]
    running = elsewhere or on_this_machine(workers)
    begun = [*append, *turn] if number else build
    return [*begun, *source, *final, *place.build_flags, *running]


def lead_command(
    place: Workplace, *, grouped: bool, served: bool, reach: Reach | None = None
) -> list[str]:
    """Return the command that begins training, or goes on with it.

    Args:
        place: of the job.
        grouped: whether replicas train, which are started one by one.
        served: whether rows lie in stores.
        reach: how processes reach each other; None where all share one loopback.
    """
    job = place.served_job if served else place.job_file
    train = [*module("trainer"), "train", str(job), "--dataset", str(place.dataset)]
    train += ["--output", str(place.run), "--follow", "--resume"]
    train += ["--embedding", "cached"] if served else []
    train += ["--replicas", "0"] if grouped else []
    train += place.write_flags
    return [*train, *(["--host", reach.host] if grouped and reach is not None else [])]


def store_command(
    place: Workplace, number: int, count: int, reach: Reach | None = None, first: int = 0
) -> list[str]:
    """Return the command of one of several stores.

    Args:
        place: of the job.
        number: of the store.
        count: stores that began with slots; one of a higher number begins without.
        reach: how processes reach each other; None where all share one loopback.
        first: number of the first of these.
    """
    home = number - first
    slots = "{}:{}".format(*initial_slots(home, count)) if home < count else "none"
    store = [*module("trainer"), "store", "--directory", str(store_folder(place, number))]
    store += ["--slots", slots, *place.write_flags]
    return [*store, *(_of_loopback(place) if reach is None else _served(reach))]


def move_command(
    place: Workplace,
    ranges: Sequence[int],
    givers: Sequence[int],
    taker: int,
    reach: Reach | None = None,
) -> list[str]:
    """Return the command that moves ranges of slots to a store, whichever of some has them.

    Args:
        place: of the job.
        ranges: numbers of ranges; none for all that the givers have.
        givers: stores that run.
        taker: store.
        reach: how processes reach each other; None where all share one loopback.
    """
    slots = [slots_of_range(number) for number in ranges] or [(0, NUM_SLOTS)]
    move = [*module("trainer"), "migrate-slots", "--served"]
    move += ["--slots", ",".join(f"{first}:{end}" for first, end in slots)]
    move += ["--from", ",".join(address_of(place, number) for number in givers)]
    move += ["--to", address_of(place, taker)]
    return [*move, *(_of_loopback(place) if reach is None else _trusting(reach))]


def _of_loopback(place: Workplace) -> list[str]:
    """Return what a process is told whose stores share its loopback."""
    return ["--token-file", str(token_of(place))]


def replica_command(
    place: Workplace, number: int, threads: int, reach: Reach | None = None
) -> list[str]:
    """Return the command of one replica."""
    replica = [*module("trainer"), "replica", str(place.run), "--number", str(number)]
    return [*replica, "--threads", str(threads), *([] if reach is None else _served(reach))]


def _served(reach: Reach) -> list[str]:
    """Return what a process is told that listens at an address of its own."""
    files = ["--tls-cert", reach.chain, "--tls-key", reach.key]
    return ["--host", reach.host, *files, *_trusting(reach)]


def _trusting(reach: Reach) -> list[str]:
    """Return what a process is told that calls others at theirs."""
    words = ["--token-file", reach.token]
    return [*words, "--trusted", reach.chain, "--tls-name", reach.name]


def on_this_machine(workers: int) -> list[str]:
    """Return the options of Beam's local runner with so many workers."""
    count = f"--direct_num_workers={workers}"
    return [count, "--direct_running_mode=multi_processing"] if workers > 1 else [count]


def module(name: str) -> list[str]:
    """Return the beginning of a command of one of our packages."""
    return [sys.executable, "-m", name]
