"""Segments of days: one version of each, in the order of the days, whatever comes when."""

import json
import os
import re
import signal
import subprocess
import sys
from datetime import date, timedelta
from pathlib import Path

import pytest

from presage.pipelines.build import build
from presage.pipelines.cli import main
from presage.pipelines.table.indexes import segment_of_part
from presage.pipelines.table.verify import verify
from presage.schemas.dataset.manifest import read_dataset
from presage.schemas.dataset.opened import open_dataset, select_segments
from presage.schemas.dataset.run_next_uses import indexed_steps
from presage.schemas.errors import SchemaError
from presage.schemas.layout import MANIFEST, SEGMENTS
from tests.pipelines.appending import KILLED_AT, addition, changed
from tests.pipelines.logs import (
    IN_PROCESS,
    age,
    bytes_of,
    copy_of,
    request,
    unnamed_places,
    vacuum_later,
    without_attempts,
    write_job,
    write_log,
)

FIRST, LATE, LAST = "2026-01-01", "2026-01-02", "2026-01-04"
POINTS = {
    "before it is judged": ("table.commit", "pass_gate", 0),
    "before its index": ("table.indexes", "index_tables", 0),
    "before the root": ("table.commit", "commit_manifest", 0),
    "after the root": ("build", "write_copies", 0),
}


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A job and the logs of three days, one of them corrected since; not to be changed."""
    directory = tmp_path_factory.mktemp("logs")
    write_job(directory / "job")
    for seed, name in enumerate((FIRST, LATE, LAST, f"{LATE}-corrected")):
        write_log(directory / name, num_rows=150 + 20 * seed, seed=seed)
    return directory


@pytest.fixture(scope="module")
def days(logs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset of the first and the last day, then of the late one."""
    dataset = tmp_path_factory.mktemp("days") / "dataset"
    job = logs / "job" / "job.yaml"
    build(request(job, logs / FIRST, dataset, day=FIRST))
    for day in (LAST, LATE):
        build(addition(job, logs / day, dataset, day=day))
    return dataset


def arguments(logs: Path, dataset: Path, day: str, files: str) -> list[str]:
    """Return the arguments of an append."""
    job = str(logs / "job" / "job.yaml")
    given = ["append", job, "--dataset", str(dataset), "--input", str(logs / files), "--json"]
    return [*given, "--day", day, IN_PROCESS]


@pytest.mark.slow
def test_late_day_stands_between_the_others(days: Path) -> None:
    opened = open_dataset(days)
    assert [s.day for s in opened.segments] == [FIRST, LATE, LAST]
    apart = date.fromisoformat(FIRST) - date(1970, 1, 1)
    assert opened.segments[0].reference.position == apart // timedelta(days=1)
    ids = {s.day: s.id for s in opened.segments}
    assert opened.manifest.lineage == {f"day:{day}": name for day, name in ids.items()}
    assert verify(days)["problems"] == []


@pytest.mark.slow
def test_same_day_of_the_same_files_is_there_already(
    logs: Path, days: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = bytes_of(days)
    assert main(arguments(logs, days, LATE, LATE)) == 0
    printed = capsys.readouterr()
    found = json.loads(printed.out)
    assert (found["built"], found["day"], found["replaced"]) == (False, LATE, [])
    assert "exists already, nothing to build" in printed.err
    assert main([*arguments(logs, days, LATE, LATE), "--replace"]) == 0
    (logs / LATE).rename(logs / "renamed")
    try:  # what counts is what the files hold
        assert main(arguments(logs, days, LATE, "renamed")) == 0
    finally:
        (logs / "renamed").rename(logs / LATE)
    assert bytes_of(days) == before


@pytest.mark.parametrize(
    ("day", "files", "more", "message"),
    [
        (LATE, f"{LATE}-corrected", [], "use --replace to replace it by a new version"),
        ("2026-01-03", LATE, [], f"already exists for day {LATE}, not for day 2026-01-03"),
        (LATE, LATE, ["--position", "3"], "the day is the position"),
    ],
)
def test_other_files_or_another_day_are_refused(
    day: str,
    files: str,
    more: list[str],
    message: str,
    logs: Path,
    days: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    before = bytes_of(days)
    assert main([*arguments(logs, days, day, files), *more]) == 1
    assert re.search(re.escape(message), capsys.readouterr().err)
    assert bytes_of(days) == before


def test_segment_without_a_day_is_refused_behind_days(logs: Path, days: Path) -> None:
    job, files = logs / "job" / "job.yaml", logs / f"{LATE}-corrected"
    with pytest.raises(SchemaError, match="--day is required: the dataset"):
        build(addition(job, files, days))
    with pytest.raises(SystemExit):
        main(arguments(logs, days, "9 April", LATE))


def corrected(logs: Path, days: Path, folder: Path) -> Path:
    """Return the dataset with a new version of the late day."""
    dataset = copy_of(days, folder / "dataset")
    files = f"{LATE}-corrected"
    assert main([*arguments(logs, dataset, LATE, files), "--replace"]) == 0
    return dataset


@pytest.mark.slow
def test_new_version_of_a_day_makes_the_dataset_of_the_corrected_days(
    logs: Path, days: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old = open_dataset(days).segments[1].id
    dataset = corrected(logs, days, tmp_path)
    assert json.loads(capsys.readouterr().out)["replaced"] == [old]
    job = logs / "job" / "job.yaml"
    anew = tmp_path / "anew"
    build(request(job, logs / FIRST, anew, day=FIRST))
    for day, files in ((LATE, f"{LATE}-corrected"), (LAST, LAST)):
        build(addition(job, logs / files, anew, day=day))
    ours, theirs = (without_attempts(read_dataset(path)) for path in (dataset, anew))
    assert ours.segments[1:2] == theirs.segments[1:2]
    # the last day was judged beside another day before: its anomalies tell, nothing else does
    assert [s.manifest.files_sha256 for s in open_dataset(dataset).segments[:2]] == [
        s.manifest.files_sha256 for s in open_dataset(anew).segments[:2]
    ]
    blocks = [s.manifest.blocks_sha256 for s in open_dataset(dataset).segments]
    assert blocks == [s.manifest.blocks_sha256 for s in open_dataset(anew).segments]
    new = read_dataset(dataset).segments[1].id
    lineage = read_dataset(dataset).lineage
    assert (lineage[f"day:{LATE}"], lineage[f"replaced:{old}"]) == (new, new)
    before = read_dataset(days).segments[1].directory  # readers of the old root go on
    assert (dataset / SEGMENTS / before / MANIFEST).exists()
    assert verify(dataset)["problems"] == []


@pytest.mark.slow
def test_vacuum_removes_what_was_replaced_and_nothing_else(
    logs: Path, days: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dataset = corrected(logs, days, tmp_path)
    named, old = bytes_of(dataset), open_dataset(days).segments[1].directory.name
    capsys.readouterr()
    nothing = {"segments": [], "indexes": [], "num_files": 0, "num_bytes": 0}
    assert main(["vacuum", str(dataset), "--json"]) == 0  # it was replaced less than a week ago
    assert json.loads(capsys.readouterr().out) == nothing
    age(dataset)
    assert main(["vacuum", str(dataset), "--older-than", "7d", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["segments"] == [old]
    assert [segment_of_part(part.partition("/")[2]) for part in found["indexes"]] == [old]
    assert found["num_bytes"] > 0
    assert bytes_of(dataset) == named
    assert unnamed_places(dataset) == []
    assert main(["vacuum", str(dataset), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == nothing
    assert verify(dataset)["problems"] == []


@pytest.mark.slow
def test_version_that_comes_back_is_the_one_that_was_there(
    logs: Path, days: Path, tmp_path: Path
) -> None:
    dataset = corrected(logs, days, tmp_path)
    new = read_dataset(dataset).segments[1].id
    assert main([*arguments(logs, dataset, LATE, LATE), "--replace"]) == 0
    root = read_dataset(dataset)
    before = without_attempts(read_dataset(days))
    assert without_attempts(root).segments == before.segments
    assert root.lineage[f"replaced:{new}"] == root.segments[1].id
    assert f"replaced:{root.segments[1].id}" not in root.lineage
    assert verify(dataset)["problems"] == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "point",
    [pytest.param(p, marks=[pytest.mark.slow] if p != "after the root" else []) for p in POINTS],
)
def test_replacement_that_is_killed_leaves_one_version(
    point: str, logs: Path, days: Path, tmp_path: Path
) -> None:
    module, function, before = POINTS[point]
    dataset = copy_of(days, tmp_path / "dataset")
    old = read_dataset(days)
    driver = KILLED_AT.format(
        module=f"presage.pipelines.{module}", function=function, before=before
    )
    given = [*arguments(logs, dataset, LATE, f"{LATE}-corrected"), "--replace"]
    done = subprocess.run(
        [sys.executable, "-c", driver, *given],
        capture_output=True,
        timeout=240,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()
    root = read_dataset(dataset)
    assert verify(dataset)["problems"] == []
    assert (root.segments == old.segments) == (point != "after the root")
    assert main(given) == 0
    assert bytes_of(dataset) == bytes_of(corrected(logs, days, tmp_path / "again"))
    vacuum_later(dataset)
    assert unnamed_places(dataset) == []
    assert verify(dataset)["problems"] == []


@pytest.mark.slow
def test_index_of_selected_days_is_that_of_a_dataset_of_them(
    logs: Path, days: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    apart, job = tmp_path / "apart", logs / "job" / "job.yaml"
    build(request(job, logs / FIRST, apart, day=FIRST))
    build(addition(job, logs / LATE, apart, day=LATE))
    both = [open_dataset(apart), select_segments(open_dataset(days), (LATE, FIRST))]
    for table in both[0].job.data.tables:
        found = []
        for dataset in both:
            index = dataset.index_for(dataset.order(32, 1, "none", 0))
            steps = indexed_steps(dataset, index, table)
            found.append([(numbers.tolist(), later.tolist()) for numbers, later in steps])
        assert found[0] == found[1]
    reports = []
    for words in ([str(apart)], [str(days), "--segments", f"{FIRST},{LATE}"]):
        assert main(["oracle", *words, "--json"]) == 0
        reports.append(json.loads(capsys.readouterr().out))
    assert reports[0] == reports[1]


@pytest.mark.slow
def test_reindex_of_selected_days_builds_their_parts_alone(
    days: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dataset = copy_of(days, tmp_path / "dataset")
    words = ["oracle", str(dataset), "--epochs", "2", "--json"]
    assert main([*words, "--reindex", "--segments", f"{FIRST},{LATE}"]) == 0
    (index,) = (i for i in read_dataset(dataset).indexes if i.epochs == 2)
    assert len(index.parts) == 2
    before = bytes_of(dataset / index.id)
    assert main(words) == 1
    assert "closest: parts of 2 of 3 segments in" in capsys.readouterr().err
    assert main([*words, "--reindex"]) == 0
    assert bytes_of(dataset / index.id).items() > before.items()
    assert read_dataset(dataset).lineage == read_dataset(days).lineage
    assert verify(dataset)["problems"] == []


HELD = ("split: {evaluation_from: 2026-01-01 00:08:00}", "split: {evaluation_last: 1433m}")


@pytest.mark.slow
def test_end_of_each_day_is_held_back(logs: Path, tmp_path: Path) -> None:
    job = changed(tmp_path / "job", HELD)
    dataset = tmp_path / "dataset"
    with pytest.raises(SchemaError, match="evaluation_last needs the day"):
        build(request(job, logs / FIRST, dataset))
    build(request(job, logs / FIRST, dataset, day=FIRST))
    fixed = changed(tmp_path / "fixed", (HELD[0], "split: {evaluation_from: 2026-01-01 00:07:00}"))
    build(request(fixed, logs / FIRST, tmp_path / "other"))
    found, expected = (open_dataset(d).segments[0] for d in (dataset, tmp_path / "other"))
    assert set(found.manifest.splits) == {"train", "evaluation"}
    for part in ("samples", "groups", "access"):
        assert bytes_of(found.directory / part) == bytes_of(expected.directory / part)
    longer = changed(tmp_path / "longer", (HELD[0], "split: {evaluation_last: 2h}"))
    for other in (longer, fixed):
        with pytest.raises(SchemaError, match="evaluation_last must be"):
            build(addition(other, logs / LATE, dataset, day=LATE))
    both = changed(
        tmp_path / "both",
        (HELD[0], "split: {evaluation_from: 2026-01-01, evaluation_last: 2h}"),
    )
    with pytest.raises(SchemaError, match="has both evaluation_from and evaluation_last"):
        build(request(both, logs / FIRST, tmp_path / "no", day=FIRST))
    without = changed(tmp_path / "day", (HELD[0], "split: {evaluation_last: 1d}"))
    with pytest.raises(SchemaError, match="shorter than a day"):
        build(request(without, logs / FIRST, tmp_path / "no", day=FIRST))
