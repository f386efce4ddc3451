"""Many writers on two hosts commit to one place at once: no acknowledged commit may be lost.

A test gives a module-level function `append(url, entry)`, and compares what its place holds in the
end with what was acknowledged:

    outcome = race(url, append, tmp_path, environment)
    outcome.check(read_entries(url))
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from schemas.errors import SchemaError

NUM_WRITERS, NUM_ROUNDS = 32, 10
Append = Callable[[str, str], bool]
"""Appends an entry at a URL; returns whether it is committed, False if it was refused.

An error is an unknown outcome: the entry is there once, or not at all.
"""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the writers were told.

    Attributes:
        committed: acknowledged entries.
        refused: entries that were refused.
        unknown: entry to the error that ended its append.
    """

    committed: frozenset[str]
    refused: frozenset[str]
    unknown: Mapping[str, str]

    def check(self, entries: Collection[str]) -> None:
        """Raise AssertionError unless exactly the acknowledged entries are there, each once."""
        counts = Counter(entries)
        doubled = sorted(entry for entry, count in counts.items() if count > 1)
        lost = sorted(self.committed - set(counts))
        extra = sorted(set(counts) - self.committed - set(self.unknown))
        wrong = {"doubled": doubled, "lost": lost, "extra": extra}
        assert not any(wrong.values()), str(wrong)


def race(
    url: str,
    append: Append,
    folder: Path,
    environment: Mapping[str, str],
    *,
    num_writers: int = NUM_WRITERS,
    num_rounds: int = NUM_ROUNDS,
    num_hosts: int = 2,
) -> Outcome:
    """Let processes on several hosts append at once, once per round, each an entry of its own.

    The hosts have names and file locks of their own, as if they shared the store alone.

    Args:
        url: where they append.
        append: a function of a module.
        folder: for the files in which each writer notes its acknowledgements before it continues.
        environment: variables by which the writers find the store, perhaps behind a proxy.
        num_writers: processes.
        num_rounds: appends of each.
        num_hosts: on which the writers are spread.
    """
    notes = folder / "writers"
    hosts = [f"host-{number}" for number in range(num_hosts)]
    for host in hosts:
        (notes / host).mkdir(parents=True)
    target = f"{append.__module__}:{append.__qualname__}"
    command = [sys.executable, "-m", "tests.commit_race", target]
    writers = [
        subprocess.Popen(
            [*command, url, str(number), hosts[number % num_hosts], notes],
            cwd=Path(__file__).parents[1],
            env=os.environ | dict(environment),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in range(num_writers)
    ]
    try:
        for number in range(num_rounds + 1):  # the first line of each says that it is ready
            for writer in writers:
                assert writer.stdout is not None
                assert writer.stdout.readline(), f"a writer ended in round {number}"
            for writer in writers if number < num_rounds else ():
                assert writer.stdin is not None
                writer.stdin.write(f"{number}\n")
                writer.stdin.flush()
    finally:
        for writer in writers:
            writer.kill()
            writer.communicate()
    return _read_outcome(notes)


def _read_outcome(notes: Path) -> Outcome:
    lines = [line for path in notes.glob("*.jsonl") for line in path.read_text().splitlines()]
    results = {entry: result for entry, result in map(json.loads, lines)}
    return Outcome(
        frozenset(entry for entry, result in results.items() if result is True),
        frozenset(entry for entry, result in results.items() if result is False),
        {entry: result for entry, result in results.items() if isinstance(result, str)},
    )


def pretend_host(name: str, folder: Path) -> None:
    """Give this process a host's name, and file locks that only processes of this host share."""
    real_flock, real_lockf = fcntl.flock, fcntl.lockf
    own_inodes: set[int] = set()

    def exchange(file: Any) -> int:
        """Let a file descriptor be that of a file of this host, whose locks end when it closes."""
        number = file if isinstance(file, int) else file.fileno()
        inode = os.fstat(number).st_ino
        if inode not in own_inodes:
            own = os.open(folder / str(inode), os.O_RDWR | os.O_CREAT)
            own_inodes.add(os.fstat(own).st_ino)
            os.dup2(own, number, inheritable=False)
            os.close(own)
        return number

    def flock(file: Any, operation: int) -> None:
        real_flock(exchange(file), operation)

    def lockf(file: Any, operation: int, *rest: int) -> None:
        real_lockf(exchange(file), operation, *rest)

    fcntl.flock, fcntl.lockf = flock, lockf
    real_uname = os.uname()
    fields = (real_uname.sysname, name, *tuple(real_uname)[2:])
    os.uname = lambda: os.uname_result(fields)
    socket.gethostname = platform.node = lambda: name


def main(target: str, url: str, number: str, host: str, notes: str) -> None:
    """Append an entry for each line of the input, and note the result before the reply."""
    pretend_host(host, Path(notes) / host)
    module, _, name = target.partition(":")
    append: Append = getattr(import_module(module), name)
    with Path(notes, f"{number}.jsonl").open("a") as results:
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        for line in sys.stdin:
            entry = f"{host}-{number}-{line.strip()}"
            try:
                result: bool | str = append(url, entry)
            except (SchemaError, OSError) as error:
                result = f"{type(error).__name__}: {error}"
            results.write(f"{json.dumps([entry, result])}\n")
            results.flush()
            sys.stdout.write(f"{entry}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
