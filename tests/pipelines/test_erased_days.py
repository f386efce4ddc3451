"""What was erased from a day does not come back, and leaves its older versions, too."""

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from presage.pipelines.build import build
from presage.pipelines.cli import main
from presage.pipelines.table.verify import verify
from presage.schemas.dataset.manifest import commit_root, previous_names, read_dataset, read_root
from presage.schemas.dataset.opened import open_dataset
from presage.schemas.storage.leases import Lease
from presage.schemas.storage.location import Location
from tests.id_search import files_with_id
from tests.pipelines.appending import addition
from tests.pipelines.logs import age, bytes_of, copy_of, request, segment_directory, vacuum_later
from tests.pipelines.test_days import FIRST, LAST, LATE
from tests.pipelines.test_erase import ID, ids_file, job_of, log_with, run, sessions

NEW = f"{LATE}-corrected"


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A job and logs of days that know the id, one corrected without it; not to be changed."""
    folder = tmp_path_factory.mktemp("logs")
    job_of(folder / "job")
    for seed, name in enumerate((FIRST, LATE, LAST)):
        log_with(folder / name, seed)
    log_with(folder / NEW, 3, drop=(ID,))
    return folder


@pytest.fixture(scope="module")
def days(logs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset of two days, not to be changed."""
    dataset = tmp_path_factory.mktemp("days") / "dataset"
    job = logs / "job" / "job.yaml"
    build(request(job, logs / FIRST, dataset, day=FIRST))
    build(addition(job, logs / LATE, dataset, day=LATE))
    return dataset


@pytest.fixture(scope="module")
def rewritten(days: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The two days, written again without the id; not to be changed."""
    folder = tmp_path_factory.mktemp("left")
    dataset = copy_of(days, folder / "dataset")
    assert main(["erase", str(dataset), "--ids", ids_file(folder, ID), "--rewrite"]) == 0
    return dataset


def append(logs: Path, dataset: Path, day: str, files: str, *more: str) -> int:
    """Append a day; return the exit status."""
    job = str(logs / "job" / "job.yaml")
    given = ["append", job, "--dataset", str(dataset), "--input", str(logs / files)]
    return main([*given, "--day", day, "--json", *more])


@pytest.mark.slow
def test_rewritten_days_are_known_by_their_names_before(days: Path, rewritten: Path) -> None:
    root = read_dataset(rewritten)
    for before, now in zip(read_dataset(days).segments, root.segments, strict=True):
        assert before.id != now.id
        assert previous_names(root.lineage, now.id) == {before.id, before.manifest_sha256}
    named = {s.day: s.id for s in open_dataset(rewritten).segments}
    assert {day: root.lineage[f"day:{day}"] for day in (FIRST, LATE)} == named
    assert verify(rewritten)["problems"] == []


@pytest.mark.slow
def test_the_files_of_a_rewritten_day_bring_nothing_back(
    logs: Path, rewritten: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = bytes_of(rewritten)
    for more in ([], ["--replace"]):
        assert append(logs, rewritten, LATE, LATE, *more) == 0
        found = json.loads(capsys.readouterr().out)
        assert (found["built"], found["segment"]) == (False, read_dataset(rewritten).segments[1].id)
    job = logs / "job" / "job.yaml"
    other = logs / "job" / "other.yaml"
    text = job.read_text()
    assert "on_error: reject" in text
    other.write_text(text.replace("on_error: reject", "on_error: fail"))
    given = ["--dataset", str(rewritten), "--input", str(logs / LATE), "--day", LATE, "--replace"]
    status = main(["append", str(other), *given])
    error = capsys.readouterr().err
    assert (status, "input has the files of segment" in error) == (1, True)
    assert bytes_of(rewritten) == before


@pytest.mark.slow
def test_new_version_of_a_rewritten_day_ends_the_old_one_for_good(
    logs: Path, rewritten: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dataset = copy_of(rewritten, tmp_path / "dataset")
    assert append(logs, dataset, LATE, NEW, "--replace") == 0
    assert append(logs, dataset, LATE, LATE, "--replace") == 1
    assert "from which ids were erased; remove these ids from the files" in capsys.readouterr().err
    vacuum_later(dataset)
    assert append(logs, dataset, LAST, NEW) == 1  # its files are in the dataset
    assert files_with_id(dataset, ID) == []
    assert verify(dataset)["problems"] == []


@pytest.mark.slow
def test_day_with_tombstones_is_not_replaced(
    logs: Path, days: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dataset = copy_of(days, tmp_path / "dataset")
    run(capsys, str(dataset), "--ids", ids_file(tmp_path, ID))
    before, old = bytes_of(dataset), read_dataset(dataset).segments[1].id
    assert append(logs, dataset, LATE, NEW, "--replace") == 1
    assert capsys.readouterr().err.splitlines()[-1] == (
        f"error: segment with tombstones cannot be replaced: {old} in "
        f"{dataset}; run python -m presage.pipelines erase {dataset} --rewrite, and remove the "
        f"ids from "
        "the new files"
    )
    assert bytes_of(dataset) == before
    assert append(logs, dataset, LAST, LAST) == 0  # a new day may come
    assert ID in sessions(dataset)  # and is erased by itself
    run(capsys, str(dataset), "--ids", ids_file(tmp_path, ID), "--rewrite")
    assert append(logs, dataset, LATE, NEW, "--replace") == 0
    assert files_with_id(dataset, ID) == []


@pytest.mark.slow
def test_old_version_of_a_day_goes_with_the_rewriting_unless_a_run_holds_it(
    logs: Path, days: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dataset = copy_of(days, tmp_path / "dataset")
    old = segment_directory(dataset, 1)
    assert append(logs, dataset, LATE, NEW, "--replace") == 0
    ids, segments = ids_file(tmp_path, ID), read_dataset(dataset).segments
    with Lease(Location.parse(dataset), "run runs/1") as lease:
        lease.hold([old.name])
        age(dataset)
        assert main(["vacuum", str(dataset)]) == 0
        assert main(["erase", str(dataset), "--ids", ids, "--rewrite"]) == 1
        assert "dataset is in use by run runs/1 in " in capsys.readouterr().err
    assert read_dataset(dataset).segments == segments
    assert files_with_id(old, ID)
    run(capsys, str(dataset), "--rewrite")
    assert not old.exists()
    assert files_with_id(dataset, ID) == []
    assert append(logs, dataset, LATE, LATE, "--replace") == 0  # nothing was erased from it
    run(capsys, str(dataset), "--ids", ids, "--rewrite")
    assert files_with_id(dataset, ID) == []


@pytest.mark.slow
def test_day_of_which_nothing_was_left_does_not_come_again(
    logs: Path, days: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dataset = copy_of(days, tmp_path / "dataset")
    assert append(logs, dataset, LATE, NEW, "--replace") == 0
    first = open_dataset(dataset).segments[0]
    gone = sessions(dataset)[: first.manifest.num_samples]
    run(capsys, str(dataset), "--ids", ids_file(tmp_path, *sorted(set(gone))), "--rewrite")
    if len(open_dataset(dataset).segments) == 1:
        assert f"day:{FIRST}" not in read_dataset(dataset).lineage
    assert append(logs, dataset, FIRST, FIRST) == 1
    assert f"has the files of segment {first.id}, from which ids" in capsys.readouterr().err


def rejects_in(dataset: Path) -> list[str]:
    """Name the files of rejects of each segment that the root names."""
    return [p for s in open_dataset(dataset).segments for p in s.files if p.startswith("rejects/")]


def aged(dataset: Path, place: int, days_ago: float) -> None:
    """Let the rejects of a segment be so old."""
    root = read_root(dataset)
    when = (datetime.now(UTC) - timedelta(days=days_ago)).isoformat(timespec="seconds")
    segments = list(root.manifest.segments)
    segments[place] = replace(segments[place], built_at=when)
    assert commit_root(dataset, root, replace(root.manifest, segments=tuple(segments)))


@pytest.mark.slow
def test_rejects_go_after_their_own_time(
    days: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dataset = copy_of(days, tmp_path / "dataset")
    for place, days_ago in ((0, 40), (1, 20)):
        aged(dataset, place, days_ago)
    before, kept = bytes_of(dataset), read_dataset(dataset).segments[1]
    found = run(capsys, str(dataset), "--rejects-older-than", "60d")["rewritten"]
    assert (found["segments"], bytes_of(dataset)) == ({}, before)
    shown = files_with_id(dataset, ID)
    assert any("anomalies" in name for name in shown)
    samples = sessions(dataset)
    found = run(capsys, str(dataset), "--rejects-older-than", "30d")["rewritten"]
    assert list(found["segments"]) == [read_dataset(days).segments[0].id]
    assert read_dataset(dataset).segments[1] == kept
    first, second = open_dataset(dataset).segments
    assert not any(
        "rejects" in name or "anomalies" in name
        for name in files_with_id(Path(first.directory), ID)
    )
    assert any("rejects" in name for name in files_with_id(Path(second.directory), ID))
    assert (sessions(dataset), verify(dataset)["problems"]) == (samples, [])


@pytest.mark.slow
def test_what_is_erased_stays_so_when_rejects_go(
    days: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dataset = copy_of(days, tmp_path / "dataset")
    aged(dataset, 0, 40)
    run(capsys, str(dataset), "--ids", ids_file(tmp_path, ID))
    rewritten = sessions(dataset)
    assert ID not in rewritten
    found = run(capsys, str(dataset), "--rejects-older-than", "30d")["rewritten"]
    assert (len(found["segments"]), found["num_samples"]) == (1, 0)
    assert sessions(dataset) == rewritten
    run(capsys, str(dataset), "--rewrite")
    assert (files_with_id(dataset, ID), sorted(sessions(dataset))) == ([], sorted(rewritten))


@pytest.mark.slow
def test_rewritten_rejects_are_as_old_as_before(
    days: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dataset = copy_of(days, tmp_path / "dataset")
    for place, days_ago in ((0, 40), (1, 20)):
        aged(dataset, place, days_ago)
    ids = ids_file(tmp_path, next(s for s in sessions(dataset) if s != ID))
    run(capsys, str(dataset), "--ids", ids, "--rewrite")
    assert len(rejects_in(dataset)) == 2
    run(capsys, str(dataset), "--ids", ids, "--rejects-older-than", "30d")
    assert len(rejects_in(dataset)) == 1
    run(capsys, str(dataset), "--rewrite", "--rejects-older-than", "10d")
    assert (rejects_in(dataset), verify(dataset)["problems"]) == ([], [])
