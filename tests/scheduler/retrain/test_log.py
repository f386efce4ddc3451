"""The log, the lock and the pointer on disk: truncation, exclusion, atomic replacement."""

import os
import re
import subprocess
import sys
from dataclasses import replace
from functools import reduce
from pathlib import Path

import pytest

from scheduler.files import LOCK, directory_lock
from scheduler.retrain.drive import Root, newest_checkpoint, read_pointer, write_pointer
from scheduler.retrain.records import (
    KINDS,
    STATE,
    Begun,
    Log,
    State,
    apply_record,
    read_state,
    record_from_json,
    record_to_json,
)
from schemas.config.schedule import RetrainConfig
from schemas.errors import SchemaError
from schemas.layout import MANIFEST
from tests.scheduler.retrain.world import World, good_but_for

DAYS = [f"2026-01-0{i}" for i in range(1, 5)]


@pytest.fixture
def world() -> World:
    """Days of every kind: promoted, turned down, failed, corrected, removed."""
    world = World(
        config=RetrainConfig(keep=1),
        quality=good_but_for(f"{DAYS[1]}-v1"),
        failing={f"{DAYS[2]}.1.train.1": (-9, "killed")},
    )
    for day in DAYS[:3]:
        world.retrain(day)
    world.versions[DAYS[1]] = 2
    world.retrain(DAYS[1], corrected=True)
    world.retrain(DAYS[1], corrected=True)
    assert {type(record) for record in world.records} == set(KINDS.values())
    return world


def test_records_that_are_written_are_read(world: World, tmp_path: Path) -> None:
    with Log(tmp_path / STATE) as log:
        for record in world.records:
            log.append(record)
    assert read_state(tmp_path / STATE) == world.state == log.state
    assert [record_from_json(record_to_json(record)) for record in world.records] == world.records


def test_log_that_is_cut_anywhere_is_that_of_its_whole_lines(world: World, tmp_path: Path) -> None:
    path = tmp_path / STATE
    with Log(path) as log:
        for record in world.records[:12]:
            log.append(record)
    content = path.read_bytes()
    ends = [0, *(i + 1 for i, byte in enumerate(content) if byte == ord("\n"))]
    for cut in range(0, len(content) + 1, 29):
        # The newline alone may be missing: the line before it is whole.
        num = sum(end <= cut for end in ends) - 1 + (cut + 1 in ends)
        path.write_bytes(content[:cut])
        assert read_state(path) == reduce(apply_record, world.records[:num], State())
        with Log(path) as log:
            for record in world.records[num:12]:
                log.append(record)
        assert path.read_bytes() == content


def test_log_with_a_damaged_line_is_refused_by_place(world: World, tmp_path: Path) -> None:
    path = tmp_path / STATE
    with Log(path) as log:
        for record in world.records[:3]:
            log.append(record)
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([lines[0], '{"kind": "nothing"}\n', lines[2]]))
    message = (
        "line is no record: b'{\"kind\": \"nothing\"}' (KeyError('nothing')) in "
        f"{path}:2; restore the file"
    )
    with pytest.raises(SchemaError) as error, Log(path):
        pass
    assert str(error.value) == message


def test_log_of_a_run_that_was_never_begun_is_refused(world: World, tmp_path: Path) -> None:
    path = tmp_path / STATE
    with Log(path) as log, pytest.raises(KeyError):
        log.append(world.records[1])
    assert path.read_bytes() == b""
    assert isinstance(world.records[0], Begun)
    with Log(path) as log:
        log.append(replace(world.records[0], run="a.1"))
    assert read_state(path).attempts[0].run == "a.1"


PROBLEM, ADVICE = "another retraining uses this folder", "wait for it, or stop it"
HOLD = "import sys, time; from scheduler.files import directory_lock; from pathlib import Path\n"
HOLD += "with directory_lock(Path(sys.argv[1]), '', ''): print('held', flush=True); time.sleep(600)"


def test_root_that_another_process_holds_is_refused_with_its_pid(
    repository: Path, tmp_path: Path
) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(repository)},
        stdout=subprocess.PIPE,
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        message = (
            f"another retraining uses this folder: pid {holder.pid} in {tmp_path}; "
            "wait for it, or stop it"
        )
        with pytest.raises(SchemaError) as error, directory_lock(tmp_path, PROBLEM, ADVICE):
            pass
        assert str(error.value) == message
    finally:
        holder.kill()
        holder.communicate()
    with directory_lock(tmp_path, PROBLEM, ADVICE):  # whoever was killed holds nothing
        assert (tmp_path / LOCK).read_text() == f"{os.getpid()}\n"


def test_pointer_that_is_written_is_read_and_none_is_none(tmp_path: Path) -> None:
    root = Root(tmp_path)
    assert read_pointer(root) is None
    write_pointer(root, {"run": "a.1", "metrics": {"ne": 0.5}})
    assert read_pointer(root) == {"run": "a.1", "metrics": {"ne": 0.5}}
    assert [path.name for path in tmp_path.iterdir()] == ["PROMOTED"]
    root.pointer.write_text("{")
    message = f"pointer is not JSON in {root.pointer}; restore it"
    with pytest.raises(SchemaError) as error:
        read_pointer(root)
    assert str(error.value) == message


def test_checkpoint_of_a_run_is_its_newest_complete_one(tmp_path: Path) -> None:
    root = Root(tmp_path)
    for step in ("9", "10", "11"):
        (root.run("a.1") / "checkpoints" / step).mkdir(parents=True)
    for step in ("9", "10"):
        (root.run("a.1") / "checkpoints" / step / MANIFEST).write_text(step)
    place, digest = newest_checkpoint(root, "a.1")
    assert place == "runs/a.1/checkpoints/10"
    assert digest == "4a44dc15364204a80fe80e9039455cc1608281820fe2b24f1e5233ade6af1dd5"
    message = f"run has no checkpoint in {root.run('b.1')}; train it with --again"
    with pytest.raises(SchemaError, match=re.escape(message)):
        newest_checkpoint(root, "b.1")
