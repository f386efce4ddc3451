"""JSON files of datasets and runs with any value changed are valid, or refused in one line.

A dataset may come from a stranger, whose checksums fit. Limits of memory and time stand for all
that a wrong number can ask for.
"""

from __future__ import annotations

import json
import resource
import signal
import tempfile
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from presage.pipelines.build import build
from presage.pipelines.cli import main
from presage.pipelines.table.verify import verify
from presage.schemas.dataset.hints import read_hints
from presage.schemas.errors import PlanError, SchemaError
from presage.schemas.layout import MANIFEST
from presage.schemas.run.records import (
    CHECKPOINTS,
    LEDGER,
    METRICS,
    RUN_FILE,
    SUMMARY,
    read_summary,
)
from presage.schemas.storage.location import Location
from presage.trainer.evaluation.evaluate import evaluate_run
from presage.trainer.run.folder import verify_run
from tests.manifest_changes import (
    CHANGES,
    VALUES,
    changed,
    forge,
    keys_of,
    newest_root,
    write_checked,
)
from tests.pipelines.appending import addition
from tests.pipelines.logs import built, write_log
from tests.shared import hard_links, make_once
from tests.trainer.runs import run_job

MEMORY_BYTES = 2 << 30
"""Address space beyond that of the test process."""
SECONDS = 60
HINTS = "hints.json"


def _make(folder: Path) -> None:
    dataset = built(folder, 120)
    job = folder / "job" / "job.yaml"
    write_log(folder / "more", 120, seed=1)
    build(addition(job, folder / "more", dataset))
    assert main(["oracle", str(dataset), "--hints", str(folder / HINTS)]) == 0
    run_job(job, dataset, folder / "run")


def example() -> Path:
    """Return a folder with a job, a dataset of two segments, its hints, and a run."""
    return make_once(_make)


@contextmanager
def limits() -> Generator[None]:
    """Limit memory and time of the body."""

    def stop(*_: object) -> None:
        raise AssertionError(f"it must end within {SECONDS} s")

    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    handler = signal.signal(signal.SIGALRM, stop)
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES, before[1]))
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        resource.setrlimit(resource.RLIMIT_AS, before)
        signal.signal(signal.SIGALRM, handler)


def ends_well(call: Callable[[], object]) -> bool:
    """Call a function; return whether it was refused, in one line of ours."""
    message = ""
    try:
        with limits():
            call()
    except (SchemaError, PlanError) as error:
        message = str(error)
    assert "\n" not in message
    assert len(message) < 2000
    return bool(message)


def names_of(kind: str) -> Iterator[str]:
    """Yield the JSON files of a dataset or run, relative to the example."""
    folder = example()
    if kind == "dataset":
        dataset = folder / "dataset"
        yield newest_root(dataset).relative_to(folder).as_posix()
        for pattern in (f"segments/*/{MANIFEST}", f"index-*/*/{MANIFEST}"):
            yield from sorted(p.relative_to(folder).as_posix() for p in dataset.glob(pattern))
    else:
        yield from (f"run/{name}" for name in (RUN_FILE, SUMMARY, METRICS, LEDGER))
        manifests = (folder / "run" / CHECKPOINTS).glob(f"*/{MANIFEST}")
        yield from sorted(p.relative_to(folder).as_posix() for p in manifests)
        yield HINTS


def draw_change(data: st.DataObject, kind: str) -> tuple[str, int, Any]:
    """Draw a file, the number of one of its lines if it has some, and the changed document."""
    name = data.draw(st.sampled_from(list(names_of(kind))))
    text, line = (example() / name).read_text(), 0
    if name.endswith(".jsonl"):
        lines = text.splitlines()
        line = data.draw(st.sampled_from([0, len(lines) - 1]))
        text = lines[line]
    body = json.loads(text)
    key = data.draw(st.sampled_from(list(keys_of(body))))
    change = data.draw(st.sampled_from(CHANGES))
    return name, line, changed(body, key, change)


def check_dataset(data: st.DataObject) -> None:
    """Change a value of a dataset's manifests; verify it, plan and train one step."""
    name, _, body = draw_change(data, "dataset")
    job = example() / "job" / "job.yaml"
    with tempfile.TemporaryDirectory() as scratch:
        dataset = hard_links(example() / "dataset", Path(scratch, "dataset"))
        forge(dataset, name.removeprefix("dataset/"), body)
        ends_well(lambda: verify(dataset))
        for mode in ("plain", "cached"):
            run = Path(scratch, mode)
            ends_well(
                lambda run=run, mode=mode: run_job(job, dataset, run, steps=1, embedding=mode)
            )


def check_run(data: st.DataObject) -> None:
    """Change a value of a run's files; verify, evaluate and resume it."""
    name, line, body = draw_change(data, "run")
    dataset, job = example() / "dataset", example() / "job" / "job.yaml"
    with tempfile.TemporaryDirectory() as scratch:
        run = hard_links(example() / "run", Path(scratch, "run"))
        path = Path(scratch, name)
        if name == HINTS:
            path.write_text(json.dumps(body))
            ends_well(lambda: read_hints(path))
            return
        if name.endswith(".jsonl"):
            lines = path.read_text().splitlines()
            lines[line] = json.dumps(body)
            path.unlink()
            path.write_text("".join(f"{each}\n" for each in lines))
        else:
            write_checked(path, body)
        ends_well(lambda: read_summary(run / SUMMARY))
        ends_well(lambda: verify_run(run))
        ends_well(lambda: evaluate_run(job, Location.parse(dataset), run))
        ends_well(lambda: run_job(job, dataset, run, resume=True))


@pytest.mark.slow
@settings(max_examples=12)
@given(st.data())
def test_dataset_with_a_changed_value_is_valid_or_refused_in_one_line(data: st.DataObject) -> None:
    check_dataset(data)


@pytest.mark.slow
@settings(max_examples=12)
@given(st.data())
def test_run_with_a_changed_value_is_valid_or_refused_in_one_line(data: st.DataObject) -> None:
    check_run(data)


@pytest.mark.chaos
@settings(max_examples=500)
@given(st.data())
def test_any_dataset_with_a_changed_value(data: st.DataObject) -> None:
    check_dataset(data)


@pytest.mark.chaos
@settings(max_examples=500)
@given(st.data())
def test_any_run_with_a_changed_value(data: st.DataObject) -> None:
    check_run(data)


CASES = {
    "a shuffle key beyond 64 bits": (("segments", 0, "shuffle_key"), 2**64),
    "a negative shuffle key": (("segments", 0, "shuffle_key"), -1),
    "an index without samples in a batch": (("indexes", 0, "batch_samples"), 0),
    "a segment twice": (("segments",), "duplicate"),
    "segments swapped": (("segments",), "swap"),
    "a day that is none": (("segments", 0, "day"), "x" * 100_000),
}


@pytest.mark.parametrize("case", CASES)
def test_root_with_wrong_values_is_refused_by_name(case: str, tmp_path: Path) -> None:
    key, change = CASES[case]
    dataset = hard_links(example() / "dataset", tmp_path / "dataset")
    root = newest_root(dataset)
    body = json.loads(root.read_text())
    body["segments"][0].update({"shuffle_key": 1, "day": None})
    change = VALUES.index(change) if change in VALUES else change
    forge(dataset, root.relative_to(dataset).as_posix(), changed(body, key, change))
    with pytest.raises(SchemaError, match=r"^[^\n]+; [^\n]+$") as caught:
        verify(dataset)
    assert caught.value.file == str(root)
    assert str(key[-1]).rstrip("s") in str(caught.value)


def test_splits_beyond_the_blocks_are_refused_before_they_are_allocated(tmp_path: Path) -> None:
    dataset = hard_links(example() / "dataset", tmp_path / "dataset")
    name = next(name for name in names_of("dataset") if "segments/" in name)
    body = json.loads((example() / name).read_text())
    body["splits"]["train"][1] = 2**40
    forge(dataset, name.removeprefix("dataset/"), body)
    assert ends_well(lambda: run_job(example() / "job" / "job.yaml", dataset, tmp_path / "run"))
    assert any("splits differ from those of" in line for line in verify(dataset)["problems"])


def test_segments_that_exchange_their_manifests_are_found(tmp_path: Path) -> None:
    dataset = hard_links(example() / "dataset", tmp_path / "dataset")
    root = newest_root(dataset)
    body = json.loads(root.read_text())
    ids = [segment["id"] for segment in body["segments"]]
    body["segments"] = body["segments"][::-1]
    for segment, name in zip(body["segments"], ids, strict=True):
        segment["id"] = name
    body["indexes"] = []
    forge(dataset, root.relative_to(dataset).as_posix(), body)
    problems = verify(dataset)["problems"]
    assert sum("id must end with " in line for line in problems) == 2
