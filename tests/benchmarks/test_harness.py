"""What all benchmarks share: options, rounds and results; and each one at its smallest size."""

import json
import subprocess
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks import __main__ as runner
from benchmarks.common.harness import SKIPPED, MissingError, Options, alternate, compared
from tests.shared import error_of, json_of

KEYS = {"ours", "peer", "ratio", "unit", "rounds"}


def test_sides_alternate_and_warm_up_rounds_are_dropped() -> None:
    asked = list[str]()

    def side(name: str) -> int:
        asked.append(name)
        return len(asked)

    found = alternate({name: lambda name=name: side(name) for name in "ab"}, 2, warm_up=1)
    assert asked == ["a", "b", "b", "a", "a", "b"]
    assert found == {"a": [4, 5], "b": [3, 6]}


@pytest.mark.parametrize(("higher", "ratio"), [(False, 2.0), (True, 0.5)])
def test_ratio_is_above_1_where_ours_is_better(higher: bool, ratio: float) -> None:
    found = compared([1.0, 2.0, 2.0], [2.0, 4.0, 5.0], "s", higher=higher, bound=9.0)
    assert (found["ours"], found["peer"], found["ratio"], found["bound"]) == (2.0, 4.0, ratio, 9.0)
    assert found["spread"] == [min(found["rounds"]), max(found["rounds"])]


def example(words: Sequence[str] | None = None) -> int:
    """Run a benchmark that returns its options, and needs a positive size."""

    def measure(options: Namespace, scratch: Path) -> dict[str, Any]:
        assert scratch.is_dir()
        if not options.size:
            raise MissingError("a size must be there, got none")
        return {"rounds": options.rounds, "size": options.size, "names": options.names}

    options = Options("example", "Text.", rounds=5)
    options.add("--size", 100, "of it", small=1)
    options.add("--names", ("a", "b"), "some", choices=("a", "b", "c"))
    return options.run(measure, words)


def test_small_changes_defaults_only(capsys: pytest.CaptureFixture[str]) -> None:
    assert json_of(example, ["--json"]) == {"rounds": 5, "size": 100, "names": ["a", "b"]}
    small = json_of(example, ["--json", "--small", "--names", "c"])
    assert small == {"rounds": 1, "size": 1, "names": ["c"]}
    assert json_of(example, ["--json", "--small", "--size", "7"])["size"] == 7
    with pytest.raises(SystemExit):
        example(["--names", "a,z"])
    assert "--names must be of a, b, c, got 'z'" in capsys.readouterr().err


def test_missing_peer_is_skipped_with_a_line() -> None:
    found = error_of(example, ["--size", "0"], SKIPPED)
    assert found == "skipped example: a size must be there, got none\n"


def test_part_that_lacks_something_is_left_out() -> None:
    def first(*_: object) -> dict[str, Any]:
        raise MissingError("a tool must be there, got none")

    def second(options: Namespace, _: Path) -> dict[str, Any]:
        return {name: compared([1.0], [2.0], "s") for name in ("x", "y")}

    def run(words: Sequence[str] | None = None) -> int:
        options = Options("example", None)
        options.add_parts({"first": first, "second": second})
        return options.run_parts(words)

    found = json_of(run, ["--json"])
    assert (found["ratio"], found["unit"], list(found["details"])) == (2.0, "s, x", ["x", "y"])
    message = "skipped example, first: a tool must be there, got none\n"
    found = error_of(run, ["--parts", "first"], SKIPPED)
    assert found == f"{message}skipped example: a part must run, got none\n"


def test_runner_continues_after_a_failure_and_then_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ends = {"model": "failed", "policies": "skipped", "train": "done"}
    monkeypatch.setattr(runner, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(runner, "run", lambda name, small: ends[name])
    lines = error_of(runner.main, [*ends]).splitlines()
    assert [line.split(",")[0] for line in lines[:3]] == [
        "failed model",
        "skipped policies",
        "done train",
    ]
    assert lines[3:] == ["skipped: policies", "failed: model"]
    monkeypatch.setitem(ends, "model", "done")
    assert error_of(runner.main, [*ends], 0).splitlines()[-1] == "failed: none"


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", runner.names())
def test_each_benchmark_runs_at_its_smallest_size(name: str, repository: Path) -> None:
    words = [sys.executable, "-m", f"benchmarks.{name}", "--small", "--json"]
    done = subprocess.run(words, cwd=repository, capture_output=True, text=True, check=False)
    if done.returncode == SKIPPED:
        pytest.skip(done.stderr.splitlines()[-1])
    assert done.returncode == 0, done.stderr[-2000:]
    (line,) = done.stdout.splitlines()
    assert json.loads(line).keys() >= KEYS
