"""Run all benchmarks, or the named ones, each in a process of its own.

`python -m benchmarks [--small] [NAME...]`

The result of each is written to `benchmarks/results/NAME.json`. One that lacks a peer, a tool or
data is skipped; one that fails does not stop the others, but the status is then 1.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.common.harness import SKIPPED
from benchmarks.common.logs import REPOSITORY

FOLDER = Path(__file__).parent
RESULTS = FOLDER / "results"
HELPERS = ("common", "peers")
"""Folders without benchmarks."""


def names() -> list[str]:
    """Return the names of all benchmarks, as in `python -m benchmarks.NAME`."""
    paths = [path.relative_to(FOLDER).with_suffix("") for path in FOLDER.rglob("*.py")]
    return sorted(
        ".".join(path.parts)
        for path in paths
        if path.parts[0] not in HELPERS and not path.name.startswith("__")
    )


def run(name: str, *, small: bool) -> str:
    """Run one benchmark and write its result; return `done`, `skipped` or `failed`."""
    command = [sys.executable, "-m", f"benchmarks.{name}", "--json"]
    done = subprocess.run(
        [*command, *(["--small"] if small else [])],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        check=False,
    )
    if done.returncode:
        return "skipped" if done.returncode == SKIPPED else "failed"
    (RESULTS / f"{name}.json").write_bytes(done.stdout)
    return "done"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmarks, and list what became of each."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(names())}")
    parser.add_argument("--small", action="store_true", help="sizes that end in seconds")
    options = parser.parse_args(argv)
    if unknown := set(options.names) - set(names()):
        parser.error(f"NAME must be of {', '.join(names())}, got {min(unknown)!r}")
    RESULTS.mkdir(exist_ok=True)
    ends: dict[str, str] = {}
    for name in options.names or names():
        start = time.perf_counter()
        ends[name] = run(name, small=options.small)
        sys.stderr.write(f"{ends[name]} {name}, {time.perf_counter() - start:.0f} s\n")
    for end in ("skipped", "failed"):
        found = [name for name in ends if ends[name] == end]
        sys.stderr.write(f"{end}: {', '.join(found) or 'none'}\n")
    return int("failed" in ends.values())


if __name__ == "__main__":
    sys.exit(main())
