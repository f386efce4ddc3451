"""Seconds of the tests by file: their sum after a run, and equal parts of the nightly tests.

`tests/seconds.tsv` has them as of the last run with `--write-seconds`: those of the tests of `make
test`, and those of nightly ones. `python -m tests.durations` prints the number of parts;
`python -m tests.durations directories` the table of the README.
"""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from math import ceil
from pathlib import Path

import pytest

SECONDS = Path(__file__).with_name("seconds.tsv")
PART_SEC = 15 * 60
"""Of the nightly tests that continuous integration runs with one commit."""
SLOWEST = 20
WORKERS = 2
_WHOLE_RUN = 1000
"""Tests of a run whose seconds are compared with the table."""
_LONGEST_MIN = 15
"""Of `make test` on two idle cores."""


def read_seconds() -> dict[str, tuple[float, float]]:
    """Return the seconds of each file in `make test`, and those of its nightly tests."""
    rows = (line.split("\t") for line in SECONDS.read_text().splitlines())
    return {path: (float(usual), float(nightly)) for path, usual, nightly in rows}


def num_parts() -> int:
    """Return the number of parts of the nightly tests."""
    total = sum(nightly for _, nightly in read_seconds().values())
    return max(1, ceil(total / WORKERS / PART_SEC))


def part_of_files(files: Iterable[str], number: int, count: int) -> set[str]:
    """Return the files of a part: each goes to the part that has the fewest seconds so far.

    Args:
        files: with nightly tests.
        number: of the part, from 0.
        count: of all parts.
    """
    known = {path: nightly for path, (_, nightly) in read_seconds().items()}
    total, parts = [0.0] * count, [set[str]() for _ in range(count)]
    for path in sorted(files, key=lambda path: (-known.get(path, 1.0), path)):
        least = min(range(count), key=lambda each: (total[each], each))
        parts[least].add(path)
        total[least] += known.get(path, 1.0)
    return parts[number]


def file_of(item: pytest.Item) -> str:
    """Return the path of a test's file, as in the table."""
    return item.nodeid.partition("::")[0]


class Durations:
    """Adds up the seconds of tests, and describes them after the last one."""

    def __init__(self, *, writes: bool) -> None:
        """`writes` puts the seconds of the run into the table."""
        self._writes = writes
        self._start = time.monotonic()
        self._tests = defaultdict[str, float](float)
        self._nightly = set[str]()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add the seconds of a test's set-up, call or end."""
        self._tests[report.nodeid] += report.duration
        if "nightly" in report.keywords:
            self._nightly.add(report.nodeid)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print the seconds of a long run, its slowest tests, and what the table has less."""
        known = read_seconds()
        if self._writes:
            self._write()
        if len(self._tests) < _WHOLE_RUN:
            return
        usual = {test: sec for test, sec in self._tests.items() if test not in self._nightly}
        before = sum(known.get(path, (0.0, 0.0))[0] for path in _by_file(usual))
        terminalreporter.section("seconds of tests")
        for test, seconds in sorted(self._tests.items(), key=lambda t: -t[1])[:SLOWEST]:
            terminalreporter.line(f"{seconds:7.1f} {test}")
        total = sum(usual.values())
        if "slow" not in str(terminalreporter.config.getoption("markexpr")):
            terminalreporter.line(
                f"{total:,.0f} s in all, of `make test`; {before:,.0f} s in {SECONDS.name}: "
                f"{total - before:+,.0f} s"
            )
        minutes = (time.monotonic() - self._start) / 60
        if minutes > _LONGEST_MIN and not self._nightly:
            terminalreporter.line(
                f"warning: make test should end within {_LONGEST_MIN} minutes on two idle cores, "
                f"got {minutes:.1f}"
            )

    def _write(self) -> None:
        seconds = {path: list(each) for path, each in read_seconds().items()}
        for index, nightly in enumerate((False, True)):
            tests = {t: s for t, s in self._tests.items() if (t in self._nightly) == nightly}
            for path, total in _by_file(tests).items():
                seconds.setdefault(path, [0.0, 0.0])[index] = total
        rows = sorted(
            (p, a, b) for p, (a, b) in seconds.items() if a + b > 0.1 and Path(p).exists()
        )
        lines = [f"{path}\t{usual:.1f}\t{nightly:.1f}\n" for path, usual, nightly in rows]
        SECONDS.write_text("".join(lines))


def _by_file(tests: Mapping[str, float]) -> dict[str, float]:
    files = defaultdict[str, float](float)
    for test, seconds in tests.items():
        files[test.partition("::")[0]] += seconds
    return files


def directories() -> list[str]:
    """Return the lines of a table of the seconds by directory."""
    sums = defaultdict[str, list[float]](lambda: [0.0, 0.0])
    for path, seconds in read_seconds().items():
        for directory in (str(Path(path).parent), "all"):
            sums[directory] = [a + b for a, b in zip(sums[directory], seconds, strict=True)]
    rows = sorted(sums.items(), key=lambda row: -sum(row[1]))
    return [f"| {name} | {usual:,.0f} | {nightly:,.0f} |" for name, (usual, nightly) in rows]


if __name__ == "__main__":
    print(*(directories() if sys.argv[1:] else [num_parts()]), sep="\n")  # noqa: T201
