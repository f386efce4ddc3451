"""A replica that hangs is named and ended, and the others continue; if all hang the run ends."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from schemas.config.train import LimitsConfig
from schemas.errors import SchemaError
from schemas.storage import Location
from tests.trainer.make_dataset import make_dataset, write_job
from tests.trainer.processes import trained, with_keys
from tests.trainer.replica_runs import run_replicas
from tests.trainer.runs import assert_equal
from tests.trainer.test_draining import SEGMENT, with_a_fifo
from trainer.elastic.context import read_rendezvous, write_rendezvous
from trainer.elastic.launcher import start_replica
from trainer.elastic.worker import replica_limits

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(400)]

LINE = (
    r"error: phase must end within 6 s, got phase='read', step=\d+, rank='(\d)' after \d+\.\d s; "
    r"see what each thread waits for in .*/stacks-\1.txt, raise train.limits.read if it is only "
    r"slow, and continue with --resume"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a job, its dataset, and one of whose files never come."""
    folder = tmp_path_factory.mktemp("limits")
    job = with_keys(write_job(folder), "limits: {read: 6s}")
    make_dataset(folder / "dataset", job, SEGMENT)
    shutil.copytree(folder / "dataset", folder / "stuck")
    with_a_fifo(folder / "stuck")
    return folder


def stuck_run(folder: Path, run: Path, number: str) -> Path:
    """Return a folder that is the run for one replica, which waits for a file."""
    own = run.with_name(f"{run.name}-{number}")
    if own.is_dir():
        return own
    own.mkdir()
    for path in run.iterdir():
        (own / path.name).symlink_to(path)
    write_rendezvous(
        Location.parse(own),
        replace(read_rendezvous(Location.parse(run)), dataset=str(folder / "stuck")),
    )
    return own


def train(folder: Path, run: Path, stuck: Sequence[str]) -> None:
    """Train on two replicas, of which some wait for a file."""

    def start(arguments: Sequence[str]) -> subprocess.Popen[bytes]:
        command, _, *given = arguments
        number = given[given.index("--number") + 1]
        if number not in stuck:
            return start_replica(arguments)
        return start_replica([command, str(stuck_run(folder, run, number)), *given])

    launch = {"start": start}
    run_replicas(folder / "job.yaml", run, dataset=folder / "dataset", launch=launch)


def test_others_continue_without_a_replica_that_hangs(folder: Path, tmp_path: Path) -> None:
    run, alone = tmp_path / "run", tmp_path / "alone"
    train(folder, run, ["1"])
    trained(folder / "job.yaml", folder / "dataset", alone)
    assert_equal(run, alone)
    [line] = (tmp_path / "run-1" / "stacks-1.txt").read_text().splitlines()[-1:]
    found = re.fullmatch(LINE, line)
    assert found is not None, line
    assert found[1] == "1"
    assert not (run / "stacks-0.txt").exists()


def test_run_ends_where_all_replicas_hang(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(SchemaError, match=r"all replicas ended, \[0, 1\] hung"):
        train(folder, tmp_path / "run", ["0", "1"])


def test_a_replica_waits_for_others_longer_than_they_may_take() -> None:
    seconds = replica_limits(LimitsConfig())
    single = LimitsConfig().seconds()
    assert seconds["sync"] == single["sync"] + single["save"]
    assert seconds["wait"] == single["wait"] + seconds["sync"]
    longer = {"sync": 0.0, "wait": 0.0}
    assert {**seconds, **longer} == {**single, **longer}
