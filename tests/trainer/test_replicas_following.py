"""Replicas that follow their dataset have the bits of one process on the finished one."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from schemas.errors import SchemaError
from schemas.manifest import read_dataset
from schemas.run_log import LEDGER
from schemas.storage import Location
from tests.shared import with_long
from tests.trainer.faults import Faults
from tests.trainer.growing import (
    GROWING,
    ONCE,
    commit,
    job,
    make_versions,
    versions,
    whole,
)
from tests.trainer.make_dataset import change_root, write_job
from tests.trainer.processes import (
    ended,
    num_steps,
    started,
    trained,
    until,
)
from tests.trainer.replicas_following import KNOWN, Together
from tests.trainer.runs import assert_equal, checkpoint_at, run_job
from tests.trainer.stores import kill_stores
from trainer.elastic.context import read_rendezvous, write_rendezvous
from trainer.elastic.launcher import start_replica
from trainer.elastic.peer_state import REPLICAS
from trainer.recovery import Drain, DrainInterrupt
from trainer.run import read_ledger

__all__ = ["job", "versions", "whole"]

pytestmark = [pytest.mark.nightly, pytest.mark.slow, pytest.mark.timeout(400)]
CACHED: dict[str, Any] = {"embedding": "cached", "stores": 2}


@pytest.fixture
def together(job: Path, versions: list[Path], tmp_path: Path) -> Together:
    """Replicas and a pipeline at its first segment."""
    return Together(job, versions, tmp_path)


@pytest.mark.parametrize(
    ("waits", "count", "options"),
    [
        (KNOWN, 1, {}),
        (KNOWN, 2, CACHED),
        (KNOWN, 3, {}),
        ((20,), 1, CACHED),
        ((20,), 2, {}),
        ((20,), 2, {"embedding": "uncached", "stores": 2}),
        ((20,), 3, CACHED),
    ],
    ids=str,
)
def test_any_number_of_replicas_that_follow_has_the_bits_of_one_on_the_finished_dataset(
    waits: tuple[int, ...], count: int, options: dict[str, Any], together: Together, whole: Path
) -> None:
    early = () if waits == KNOWN else (2, 9, 17)
    summary = together.train(
        lambda _: together.more(),
        waits,
        at_step=dict.fromkeys(early, together.more),
        count=count,
        **options,
    )
    assert summary.num_steps == 22
    assert_equal(together.run, whole)


FAULTS = {
    "who writes, in the first step of an extension": (Faults().kill(0, 12, "start"), CACHED),
    "who writes, before the first lines of an extension": (Faults().kill(0, 12, "committed"), {}),
    "one, before the last step that is known": (Faults().kill(1, 11, "exchanged"), CACHED),
    "both, one after the other": (
        Faults().kill(1, 12, "start").kill(0, 16, "computed"),
        CACHED,
    ),
    "one is held, and then behind an extension": (Faults().stop(1, 11, 5.0), {}),
}


@pytest.mark.parametrize(
    "what",
    with_long(
        FAULTS,
        "both, one after the other",
        "one, before the last step that is known",
        "who writes, before the first lines of an extension",
    ),
)
def test_faults_at_an_extension_do_not_show(what: str, together: Together, whole: Path) -> None:
    faults, options = FAULTS[what]
    together.train(lambda _: together.more(), faults=faults, **options)
    assert_equal(together.run, whole)


def test_replicas_that_die_while_all_wait_come_back_and_go_on(
    together: Together, whole: Path
) -> None:
    def living() -> str:
        return (together.run / REPLICAS).read_text()

    def kill_and_commit(step: int) -> None:
        if step == 12:  # one that has come back waits with the others
            before = living()
            together.kill(1)
            together.until(lambda: living() != before and len(json.loads(living())) == 2)
        elif step == 16:  # who writes dies as a segment comes
            together.kill(0)
        elif step == 19:
            together.kill(0)
            together.kill(1)
        together.more()

    together.train(kill_and_commit, **CACHED)
    assert_equal(together.run, whole)


def test_stores_that_die_while_replicas_wait_do_not_show(together: Together, whole: Path) -> None:
    def kill_and_commit(step: int) -> None:
        if step in (12, 19):
            kill_stores(together.run, 0, forget=step == 19)
        together.more()

    summary = together.train(kill_and_commit, **CACHED)
    assert summary.num_rollbacks == 1
    assert_equal(together.run, whole)


def test_replicas_that_are_asked_while_they_wait_end_and_go_on(
    together: Together, whole: Path
) -> None:
    def ask(step: int) -> None:
        if step == 12:
            together.more()
            return
        together.kill(1, signal.SIGTERM)  # one leaves, the other waits on
        together.until(lambda: list(together.replicas[-1].pids) == [0])
        together.drain.ask("SIGTERM")

    with pytest.raises(DrainInterrupt) as asked:
        together.train(ask, (12, 16), **CACHED)
    run = together.run
    assert asked.value.message == f"stopped at step 16; continue {run} with --resume"
    together.more()
    together.drain = Drain()
    together.train(lambda _: together.more(), (19, 20), resume=True, **CACHED)
    assert_equal(run, whole)


def test_a_replica_that_sees_segments_later_than_the_others_holds_nobody_s_bits_up(
    together: Together, whole: Path, tmp_path: Path
) -> None:
    late = tmp_path / "late"
    shutil.copytree(together.dataset, late)

    def start(arguments: Sequence[str]) -> subprocess.Popen[bytes]:
        command, run, *given = arguments
        if given[given.index("--number") + 1] == "1":
            run = str(seen_by_another(together.run, late))
        return start_replica([command, run, *given])

    def see(step: int) -> None:
        together.more()
        if step == 16:
            together.kill(1)  # it comes back, and must see what the others have trained
        commit(together.dataset, late)

    together.train(see, start=start, **CACHED)
    assert_equal(together.run, whole)
    computed = {e.step for e in read_ledger(together.run / LEDGER) if e.replica.startswith("001")}
    assert max(computed) >= 12, "it takes part in steps that it has seen later"


def seen_by_another(run: Path, dataset: Path) -> Path:
    """Return a folder that is the run for a replica that sees another folder as its dataset."""
    own = run.with_name("run-1")
    shutil.rmtree(own, ignore_errors=True)
    own.mkdir()
    for path in run.iterdir():
        (own / path.name).symlink_to(path)
    (own / REPLICAS).unlink(missing_ok=True)
    (own / REPLICAS).symlink_to(run / REPLICAS)
    write_rendezvous(
        Location.parse(own), replace(read_rendezvous(Location.parse(run)), dataset=str(dataset))
    )
    return own


def test_a_dataset_that_was_replaced_ends_the_run_when_it_is_saved(
    together: Together, versions: list[Path], whole: Path
) -> None:
    other = replace(read_dataset(versions[1]).segments[0], id="00000-other")

    def change(step: int) -> None:
        together.more()
        together.until(lambda: num_steps(together.run) == 16)
        change_root(
            together.dataset, lambda root: replace(root, segments=(other, *root.segments[1:]))
        )

    with pytest.raises(SchemaError, match=r"replica \d failed with status 1"):
        together.train(change, (12,))
    assert checkpoint_at(together.run, num_steps(together.run)).is_dir()
    commit(versions[1], together.dataset)
    together.more()
    together.train(lambda _: together.more(), (19, 20), resume=True)
    assert_equal(together.run, whole)


def test_a_cache_that_a_later_segment_does_not_fit_ends_the_run_when_it_is_saved(
    tmp_path: Path,
) -> None:
    job = write_job(tmp_path / "job", **ONCE, policy="belady", rows="200")
    versions = make_versions(tmp_path / "versions", job, [[(64, 0)], [(700, 0)]])
    together = Together(job, versions, tmp_path)
    with pytest.raises(SchemaError, match=r"replica \d failed with status 1"):
        together.train(lambda _: together.more(), (1,), **CACHED)
    assert num_steps(together.run) == 1
    assert checkpoint_at(together.run, 1).is_dir()


def test_a_pipeline_that_has_died_ends_the_run_after_the_limit(
    job: Path, versions: list[Path], whole: Path, tmp_path: Path
) -> None:
    impatient = tmp_path / "job.yaml"
    impatient.write_text(f"{job.read_text()}  limits: {{wait: 10s}}\n")
    together = Together(impatient, versions, tmp_path)
    with pytest.raises(SchemaError, match=r"replica \d failed with status 1"):
        together.train(lambda _: None, ())
    assert together.waits(12)
    together.job = job
    together.train(lambda _: together.more(), resume=True)
    assert_equal(together.run, whole)


def test_a_dataset_that_is_not_there_yet_is_waited_for(
    job: Path, versions: list[Path], whole: Path, tmp_path: Path
) -> None:
    together = Together(job, [], tmp_path)
    together.left = iter(versions)
    said: list[str] = []

    def say(line: str) -> None:
        said.append(line)
        together.more()

    together.train(lambda _: together.more(), progress=say)
    assert said == [f"waiting at step 0: {together.dataset} does not exist yet"]
    assert_equal(together.run, whole)


def test_second_epoch_begins_after_the_last_segment(tmp_path: Path) -> None:
    job = write_job(tmp_path / "job", epochs="2", every_steps="5")
    versions = make_versions(tmp_path / "versions", job, GROWING[1:])
    run_job(job, versions[-1], tmp_path / "whole")
    together = Together(job, versions, tmp_path)
    together.train(lambda _: together.more(), (4, 7, 8), **CACHED)
    assert num_steps(together.run) == 20
    assert_equal(together.run, tmp_path / "whole")


def test_command_says_what_is_waited_for_once_and_ends_when_asked(
    together: Together, versions: list[Path], whole: Path
) -> None:
    run, arguments = together.run, ("--replicas", "2", "--follow")
    process = started(together.job, together.dataset, run, *arguments, own_group=True)
    until(process, lambda: together.waits(12))
    together.more()
    until(process, lambda: together.waits(16))
    os.killpg(process.pid, signal.SIGTERM)
    status, said = ended(process)
    assert status == 0, said
    lines = [line for line in said.splitlines() if line.startswith("waiting at step 12: 1 segment")]
    assert len(lines) == 1
    assert said.splitlines()[-1] == (f"SIGTERM: stopped at step 16; continue {run} with --resume")
    commit(versions[-1], together.dataset)
    trained(together.job, together.dataset, run, *arguments, "--resume")
    assert_equal(run, whole)
