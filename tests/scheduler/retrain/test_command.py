"""The command line: rejected arguments, `--list`, sizes."""

import re
from pathlib import Path

import pytest

from presage.scheduler.__main__ import main
from presage.scheduler.retrain.drive import RetrainRoot, command_of, sizes_of
from presage.scheduler.retrain.records import Attempt, Started
from presage.scheduler.retrain.retrain import run_rows
from presage.scheduler.retrain.root_log import RetrainLog
from presage.schemas.config.schedule import RetrainConfig
from presage.schemas.machine import machine_budget
from presage.schemas.run.records import RUN_FILE
from presage.schemas.storage.location import Location
from tests.scheduler.retrain.world import World, good_but_for
from tests.scheduler.small_job import write_job
from tests.shared import error_of, json_of, output_of

ONE, TWO, THREE = (f"2026-01-0{i}" for i in range(1, 4))
SPLIT = "  split: {evaluation_from: 2026-01-02}\n"


def job_of(folder: Path, schedule: str = "  priority: 0", split: str = SPLIT) -> Path:
    """Write the small job, with a split."""
    job = write_job(folder, schedule)
    text = job.read_text()
    assert "  oracle:" in text
    job.write_text(text.replace("  oracle:", f"{split}  oracle:"))
    return job


REFUSED = {
    "no day": ([], "give either --date or --from"),
    "two ways to say it": (["--date", ONE, "--from", ONE], "give either --date or --from"),
    "no date": (["--date", "monday"], "day must be a date, got 'monday'; write 2026-04-09"),
    "no output": (
        ["--date", ONE],
        "neither --output nor schedule.retrain.output is set; name the root",
    ),
    "no input": (
        ["--date", ONE, "--output", "root"],
        "neither --input nor schedule.retrain.input is set; name the folder of the raw files",
    ),
    "several days in one folder": (
        ["--from", ONE, "--to", TWO, "--output", "root", "--input", "logs"],
        "input is the same folder for 2 days: 'logs'; write logs/{date}",
    ),
}


@pytest.mark.parametrize(("words", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_main_retrain_of_what_is_not_enough_is_refused_in_one_line(
    words: list[str], message: str, tmp_path: Path
) -> None:
    job = job_of(tmp_path)
    assert error_of(main, ["retrain", str(job), *words]) == f"error: {message}\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["job.yaml", "schema.pbtxt"]


def test_main_retrain_of_a_job_that_holds_nothing_back_is_refused(tmp_path: Path) -> None:
    job = job_of(tmp_path, split="")
    words = ["--date", ONE, "--output", str(tmp_path / "root"), "--input", str(tmp_path)]
    assert error_of(main, ["retrain", str(job), *words]) == (
        f"error: data.split has no evaluation split to judge models on in {job}; write "
        "split: {evaluation_last: 2h}\n"
    )


def test_main_retrain_of_a_day_without_a_folder_begins_nothing(tmp_path: Path) -> None:
    job = job_of(tmp_path, '  retrain: {input: "logs/{date}", output: root}')
    assert error_of(main, ["retrain", str(job), "--date", ONE]) == (
        f"error: input of {ONE} is no folder: {tmp_path / 'logs' / ONE}; wait for "
        "the logs, or set --input\n"
    )
    assert not (tmp_path / "root").exists()


@pytest.fixture
def world() -> World:
    """A day that is promoted, one that is turned down and then corrected, one unfinished."""
    world = World(
        quality=good_but_for(f"{TWO}-v1"), failing={f"{THREE}.1.train.1": (1, "a|disk is full")}
    )
    for day in (ONE, TWO):
        world.retrain(day)
    world.versions[TWO] = 2
    world.retrain(TWO, corrected=True)
    world.retrain(THREE)
    return world


def test_rows_of_a_log_have_version_metrics_and_why_not(world: World) -> None:
    rows = [
        (r["day"], r["run"], r["version"], r["ne"], r["promoted"], r["why_not"])
        for r in run_rows(world.state)
    ]
    turned_down = rows[1][-1]
    assert rows == [
        (ONE, f"{ONE}.1", 1, 0.9, True, ""),
        (TWO, f"{TWO}.1", 1, 1.5, False, turned_down),
        (TWO, f"{TWO}.2", 2, 0.9, True, ""),
        (THREE, f"{THREE}.1", 1, None, False, rows[3][-1]),
    ]
    assert turned_down.startswith("NE 1.5 is above 1 (gate.max_ne); AUC 0.4 is below 0.5 ")
    assert rows[3][-1] == "unfinished: train is next; train failed: a|disk is full"


def test_main_retrain_list_prints_a_line_for_each_run(world: World, tmp_path: Path) -> None:
    job = job_of(tmp_path)
    with RetrainLog(Location.parse(tmp_path / "root")) as log:
        for record in world.records:
            log.append(record)
    words = ["retrain", str(job), "--output", str(tmp_path / "root"), "--list"]
    lines = output_of(main, words).splitlines()
    assert [line.split()[:4] for line in lines if line.startswith("2026")] == [
        [ONE, f"{ONE}-v1", "1", f"{ONE}.1"],
        [TWO, f"{TWO}-v1", "1", f"{TWO}.1"],
        [TWO, f"{TWO}-v2", "2", f"{TWO}.2"],
        [THREE, f"{THREE}-v1", "1", f"{THREE}.1"],
    ]
    found = json_of(main, [*words, "--json"])
    assert (found["last_good"], found["runs"]) == (f"{TWO}.2", run_rows(world.state))


def test_sizes_of_a_first_day_are_those_of_the_plan_within_this_machine(tmp_path: Path) -> None:
    schedule = "  budget: {cpus: 1000, memory: 1000GiB}\n  training: {min_replicas: 1}"
    sizes = sizes_of(job_of(tmp_path, schedule), RetrainRoot(Location.parse(tmp_path)))
    assert 1 <= sizes.workers <= machine_budget().cpus
    assert 1 <= sizes.num_replicas <= machine_budget().cpus
    assert re.match(r"1 segment job x \d+ workers?, \d+ replicas? and 0 stores: ", sizes.summary)


def command(
    stage: str, root: RetrainRoot, *, allow_outside: bool = False, **more: object
) -> list[str]:
    """The words of a stage after `python -m`."""
    sizes = {"workers": 2, "num_replicas": 3}
    started = Started(time_sec=0.0, run=f"{TWO}.1", process="p", stage=stage, **sizes, **more)  # pyright: ignore[reportArgumentType]: of a table
    attempt = Attempt(run=f"{TWO}.1", day=TWO, input="logs")
    config = RetrainConfig(expire_days=9)
    return command_of(started, attempt, Path("job.yaml"), root, config, allow_outside)[2:]


def test_append_alone_may_read_a_schema_outside(tmp_path: Path) -> None:
    root = RetrainRoot(Location.parse(tmp_path))
    assert command("append", root, allow_outside=True)[-1] == "--allow-outside"
    for stage in ("train", "evaluate"):
        assert "--allow-outside" not in command(stage, root, allow_outside=True, segments=("a",))


def test_command_of_each_stage_says_what_is_done(tmp_path: Path) -> None:
    root = RetrainRoot(Location.parse(tmp_path))
    dataset, runs = str(root.dataset), tmp_path / "runs"
    workers = ["--direct_num_workers=2"]
    source = ["--input", "logs", "--day", TWO, "--json", *workers]
    assert command("append", root) == [
        "presage.pipelines",
        "build",
        "job.yaml",
        "--output",
        dataset,
        *source,
    ]
    train = [
        "presage.trainer",
        "train",
        "job.yaml",
        "--dataset",
        dataset,
        "--output",
        str(runs / f"{TWO}.1"),
    ]
    train += ["--segments", "a,b"]
    start = ["--start-from", str(runs / f"{ONE}.1"), "--expire-days", "9"]
    end = ["--replicas", "3", "--json"]
    assert command("train", root, segments=("a", "b")) == [*train, *end]
    warm = command("train", root, segments=("a", "b"), base=f"{ONE}.1")
    assert warm == [*train, *start, *end]
    (root.run(f"{TWO}.1") / RUN_FILE).write_bytes(b"")
    warm = command("train", root, segments=("a", "b"), base=f"{ONE}.1")
    assert warm == [*train, *start, "--resume", *end]
    evaluate = ["presage.trainer", "evaluate", "job.yaml", "--dataset", dataset, "--run"]
    own, other = (
        [*evaluate, str(runs / f"{d}.1"), "--segments", "b", "--json"] for d in (TWO, ONE)
    )
    assert command("evaluate", root, segments=("b",), base=f"{ONE}.1") == own
    assert command("compare", root, segments=("b",), base=f"{ONE}.1") == other
