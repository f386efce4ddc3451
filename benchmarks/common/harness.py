"""One form for all benchmarks: options, sides that alternate in rounds, and one result.

Every benchmark has `--json` (one object on one line of standard output), `--small` (a size that
ends in seconds, to check that it works; its figures say nothing) and `--rounds`. Progress is
written to standard error. A benchmark whose peer, tool or data is missing says so and ends with the
status `SKIPPED`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.common.logs import KNOWN_LOGS, SHARED_DATA, MissingError

SKIPPED = 77
"""Exit status of a benchmark that cannot run here, as in Automake."""

K = TypeVar("K")
T = TypeVar("T")
Measure = Callable[[argparse.Namespace, Path], dict[str, Any]]
"""Returns a comparison, or several by name, from the options and an empty folder."""


class Options:
    """The options of a benchmark, each with a default and a value for `--small`."""

    def __init__(self, name: str, doc: str | None, *, rounds: int | None = None) -> None:
        """Define `--json`, `--small` and, unless None, `--rounds`, which is 1 if small.

        Args:
            name: below `benchmarks`.
            doc: description.
            rounds: default of `--rounds`.
        """
        self.name = name
        self.parser = argparse.ArgumentParser(
            prog=f"python -m benchmarks.{name}",
            description=doc,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        self._small: dict[str, Any] = {}
        self._choices: dict[str, Sequence[str]] = {}
        self._parts: Mapping[str, Measure] = {}
        self.add("--json", False, "one JSON object on one line")
        self.add("--small", False, "a size that ends in seconds")
        if rounds is not None:
            self.add("--rounds", rounds, "alternating rounds of all sides", small=1)

    def add(
        self,
        flag: str,
        default: Any,
        help: str,
        *,
        small: Any = None,
        choices: Sequence[str] | None = None,
    ) -> None:
        """Define an option of the type of its default; one of a tuple is separated by commas.

        Args:
            flag: with its dashes.
            default: None is an optional path, False a flag without a value.
            help: shown by `--help`.
            small: default with `--small`; the same if None.
            choices: values, of a tuple those of each element.
        """
        key = flag.removeprefix("--").replace("-", "_")
        if small is not None:
            self._small[key] = small
        if default is False:
            self.parser.add_argument(flag, action="store_true", help=help)
            return
        if isinstance(default, tuple):
            help = f"{help}, comma-separated"
        if choices is not None:
            self._choices[key] = choices
            help = f"{help}: {', '.join(choices)}"
        kind: Callable[[str], Any] = Path if default is None else type(default)
        if isinstance(default, tuple):
            of_one = type(default[0])
            kind = lambda text: tuple(map(of_one, text.split(",")))  # noqa: E731
        self.parser.add_argument(flag, default=default, type=kind, help=help)

    def add_logs(self, names: Sequence[str], *, small: Sequence[str] = ("demo_small",)) -> None:
        """Define `--datasets`, the logs that `each_log` yields, and `--shared-data`."""
        self.add("--datasets", tuple(names), "logs", small=small, choices=KNOWN_LOGS)
        self.add_shared_data()

    def add_shared_data(self) -> None:
        """Define the folder of the published logs."""
        self.add("--shared-data", SHARED_DATA, "folder of the published logs")

    def add_parts(
        self,
        parts: Mapping[str, Measure],
        *,
        default: Sequence[str] | None = None,
        small: Sequence[str] | None = None,
    ) -> None:
        """Define `--parts`, which `run_parts` measures."""
        self._parts, names = parts, tuple(parts)
        self.add("--parts", tuple(default or names), "parts", small=small, choices=names)

    def parse(self, argv: Sequence[str] | None) -> argparse.Namespace:
        """Return the options of a command line."""
        if self.parser.parse_known_args(argv)[0].small:
            self.parser.set_defaults(**self._small)
        options = self.parser.parse_args(argv)
        for key, choices in self._choices.items():
            value = getattr(options, key)
            for one in value if isinstance(value, (tuple, list)) else (value,):
                if one not in choices:
                    flag, known = f"--{key.replace('_', '-')}", ", ".join(choices)
                    self.parser.error(f"{flag} must be of {known}, got {one!r}")
        return options

    def run(self, measure: Measure, argv: Sequence[str] | None) -> int:
        """Measure and print the result; return the exit status."""
        options = self.parse(argv)
        with tempfile.TemporaryDirectory(prefix=f"presage-{self.name}-") as scratch:
            try:
                result = measure(options, Path(scratch))
            except MissingError as error:
                sys.stderr.write(f"skipped {self.name}: {error}\n")
                return SKIPPED
        sys.stdout.write(json.dumps(result, indent=None if options.json else 2) + "\n")
        return 0

    def run_parts(self, argv: Sequence[str] | None) -> int:
        """Measure the chosen parts and print the result, which is the first comparison."""
        return self.run(self._measure_parts, argv)

    def _measure_parts(self, options: argparse.Namespace, scratch: Path) -> dict[str, Any]:
        details: dict[str, Any] = {}
        for part in options.parts:
            (scratch / part).mkdir()
            try:
                found = self._parts[part](options, scratch / part)
            except MissingError as error:
                sys.stderr.write(f"skipped {self.name}, {part}: {error}\n")
                continue
            details |= {part: found} if "ratio" in found else found
        if not details:
            raise MissingError("a part must run, got none")
        return headline(details)


def report(label: str, figures: object) -> None:
    """Write figures to standard error as they come."""
    text = json.dumps(figures, default=str)
    sys.stderr.write(f"{label}: {text}\n")
    sys.stderr.flush()


def alternate(
    sides: Mapping[K, Callable[[], T]], rounds: int, *, warm_up: int = 0
) -> dict[K, list[T]]:
    """Run every side in every round, forwards and backwards in turn.

    Args:
        sides: name -> its measurement.
        rounds: that count.
        warm_up: rounds before them, whose results are dropped.

    Returns:
        The result of each side in each round.
    """
    found: dict[K, list[T]] = {name: [] for name in sides}
    for number in range(warm_up + rounds):
        for name in [*sides][:: -1 if number % 2 else 1]:
            result = sides[name]()
            if number >= warm_up:
                found[name].append(result)
                report(f"round {number - warm_up}, {name}", result)
    return found


def timed(action: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    """Return the seconds that an action takes."""
    start = clock()
    action()
    return clock() - start


def ratios(ours: Sequence[float], peer: Sequence[float], *, higher: bool = False) -> list[float]:
    """Return how much better ours is in each round: above 1 if it is.

    Args:
        ours: by round.
        peer: by round.
        higher: whether larger values are better.
    """
    pairs = zip(ours, peer, strict=True)
    return [short(a / b if higher else b / a) for a, b in pairs]


def compared(
    ours: Sequence[float],
    peer: Sequence[float],
    unit: str,
    *,
    higher: bool = False,
    bound: float | None = None,
    **more: Any,
) -> dict[str, Any]:
    """Return the result of two sides: medians, ratio, its rounds and their spread.

    Args:
        ours: by round.
        peer: by round.
        unit: of both, and what is compared.
        higher: whether larger values are better.
        bound: the best ratio that is possible, where it is known.
        more: further figures.
    """
    rounds = ratios(ours, peer, higher=higher)
    return {
        "ours": median(ours),
        "peer": median(peer),
        "ratio": median(rounds),
        "spread": [min(rounds), max(rounds)],
        **({} if bound is None else {"bound": short(bound)}),
        "unit": unit,
        "rounds": rounds,
        **more,
    }


def headline(details: Mapping[str, Mapping[str, Any]], name: str | None = None) -> dict[str, Any]:
    """Return one of several comparisons, the first if None, and all of them."""
    name = next(iter(details)) if name is None else name
    keys = ("ours", "peer", "ratio", "spread", "bound", "unit", "rounds")
    found = {key: details[name][key] for key in keys if key in details[name]}
    return {**found, "unit": f"{found['unit']}, {name}", "details": dict(details)}


def median(values: Sequence[float]) -> float:
    """Return the median, with six digits."""
    return short(statistics.median(values), 6)


def medians(runs: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the median of each figure over some runs."""
    return {key: median([run[key] for run in runs]) for key in runs[0]}


def short(value: float, digits: int = 4) -> float:
    """Return a value with so many digits; whole numbers stay exact."""
    return value if float(value).is_integer() else float(f"{value:.{digits}g}")
