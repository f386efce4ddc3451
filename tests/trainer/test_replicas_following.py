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

from presage.schemas.dataset.manifest import read_dataset
from presage.schemas.errors import SchemaError
from presage.schemas.run.records import LEDGER
from presage.schemas.storage.location import Location
from presage.trainer.elastic.attempt import read_rendezvous, write_rendezvous
from presage.trainer.elastic.launcher import start_replica
from presage.trainer.elastic.peer_state import REPLICAS
from presage.trainer.recovery import Drain, DrainInterrupt
from presage.trainer.run.folder import read_ledger
from tests.shared import with_long
from tests.trainer.faults import Faults
from tests.trainer.following_replicas import WAITS, FollowingReplicas
from tests.trainer.growing import GROWING, ONCE, commit, job, make_versions, versions, whole
from tests.trainer.make_dataset import change_root, write_job
from tests.trainer.processes import num_steps, run_until, start_training, train_to_end, wait_for_end
from tests.trainer.runs import assert_equal, checkpoint_at, run_job
from tests.trainer.stores import kill_stores

__all__ = ["job", "versions", "whole"]

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(400)]
CACHED: dict[str, Any] = {"embedding": "cached", "stores": 2}


@pytest.fixture
def replicas(job: Path, versions: list[Path], tmp_path: Path) -> FollowingReplicas:
    return FollowingReplicas(job, versions, tmp_path)


@pytest.mark.parametrize(
    ("waits", "count", "options"),
    [
        (WAITS, 1, {}),
        (WAITS, 2, CACHED),
        (WAITS, 3, {}),
        ((20,), 1, CACHED),
        ((20,), 2, {}),
        ((20,), 2, {"embedding": "uncached", "stores": 2}),
        ((20,), 3, CACHED),
    ],
    ids=str,
)
def test_any_number_of_replicas_that_follow_has_the_bits_of_one_on_the_finished_dataset(
    waits: tuple[int, ...],
    count: int,
    options: dict[str, Any],
    replicas: FollowingReplicas,
    whole: Path,
) -> None:
    early = () if waits == WAITS else (2, 9, 17)
    at_step = dict.fromkeys(early, replicas.versions.commit_next)
    summary = replicas.train(waits=waits, at_step=at_step, launch={"count": count}, **options)
    assert summary.num_steps == 22
    assert_equal(replicas.run, whole)


FAULTS = {
    "the writer, in the first step of an extension": (Faults().kill(0, 12, "start"), CACHED),
    "the writer, before the first lines of an extension": (Faults().kill(0, 12, "committed"), {}),
    "one, before the last step that is known": (Faults().kill(1, 11, "exchanged"), CACHED),
    "both, one after the other": (Faults().kill(1, 12, "start").kill(0, 16, "computed"), CACHED),
    "one is stopped, and then behind an extension": (Faults().stop(1, 11, 5.0), {}),
}


@pytest.mark.parametrize(
    "what",
    with_long(
        FAULTS,
        "both, one after the other",
        "one, before the last step that is known",
        "the writer, before the first lines of an extension",
    ),
)
def test_faults_at_an_extension_change_no_bit(
    what: str, replicas: FollowingReplicas, whole: Path
) -> None:
    faults, options = FAULTS[what]
    replicas.train(faults=faults, **options)
    assert_equal(replicas.run, whole)


def test_replicas_that_die_while_all_wait_return_and_continue(
    replicas: FollowingReplicas, whole: Path
) -> None:
    def names() -> str:
        return (replicas.run / REPLICAS).read_text()

    def kill_and_commit(step: int) -> None:
        if step == 12:  # one that has returned waits with the others
            before = names()
            replicas.kill(1)
            replicas.until(lambda: names() != before and len(json.loads(names())) == 2)
        elif step == 16:  # the writer dies as a segment comes
            replicas.kill(0)
        elif step == 19:
            replicas.kill(0)
            replicas.kill(1)
        replicas.versions.commit_next()

    replicas.train(kill_and_commit, **CACHED)
    assert_equal(replicas.run, whole)


def test_stores_that_die_while_replicas_wait_change_no_bit(
    replicas: FollowingReplicas, whole: Path
) -> None:
    def kill_and_commit(step: int) -> None:
        if step in (12, 19):
            kill_stores(replicas.run, 0, forget=step == 19)
        replicas.versions.commit_next()

    summary = replicas.train(kill_and_commit, **CACHED)
    assert summary.num_rollbacks == 1
    assert_equal(replicas.run, whole)


def test_replicas_that_are_asked_to_end_while_they_wait_end_and_continue(
    replicas: FollowingReplicas, whole: Path
) -> None:
    def ask_to_end(step: int) -> None:
        if step == 12:
            replicas.versions.commit_next()
            return
        replicas.kill(1, signal.SIGTERM)  # one leaves, the other continues to wait
        replicas.until(lambda: list(replicas.replicas[-1].pids) == [0])
        replicas.drain.ask("SIGTERM")

    with pytest.raises(DrainInterrupt) as interrupt:
        replicas.train(ask_to_end, (12, 16), **CACHED)
    run = replicas.run
    assert interrupt.value.message == f"stopped at step 16; continue {run} with --resume"
    replicas.versions.commit_next()
    replicas.drain = Drain()
    replicas.train(waits=(19, 20), resume=True, **CACHED)
    assert_equal(run, whole)


def test_replica_that_reads_segments_later_than_the_others_changes_no_bit(
    replicas: FollowingReplicas, whole: Path, tmp_path: Path
) -> None:
    late = tmp_path / "late"
    shutil.copytree(replicas.dataset, late)

    def start(arguments: Sequence[str]) -> subprocess.Popen[bytes]:
        command, run, *given = arguments
        if given[given.index("--number") + 1] == "1":
            run = str(run_on_another_dataset(replicas.run, late))
        return start_replica([command, run, *given])

    def commit_late(step: int) -> None:
        replicas.versions.commit_next()
        if step == 16:
            replicas.kill(1)  # it is restarted, and must read what the others have trained
        commit(replicas.dataset, late)

    replicas.train(commit_late, launch={"start": start}, **CACHED)
    assert_equal(replicas.run, whole)
    computed = {e.step for e in read_ledger(replicas.run / LEDGER) if e.replica.startswith("001")}
    assert max(computed) >= 12, "it takes part in steps that it has read later"


def run_on_another_dataset(run: Path, dataset: Path) -> Path:
    """Return a folder that is the run for a replica whose dataset is in another folder."""
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


def test_dataset_that_was_replaced_ends_the_run_when_it_is_saved(
    replicas: FollowingReplicas, versions: list[Path], whole: Path
) -> None:
    other = replace(read_dataset(versions[1]).segments[0], id="00000-other")

    def change(step: int) -> None:
        replicas.versions.commit_next()
        replicas.until(lambda: num_steps(replicas.run) == 16)
        change_root(
            replicas.dataset, lambda root: replace(root, segments=(other, *root.segments[1:]))
        )

    with pytest.raises(SchemaError, match=r"replica \d failed with status 1"):
        replicas.train(change, (12,))
    assert checkpoint_at(replicas.run, num_steps(replicas.run)).is_dir()
    commit(versions[1], replicas.dataset)
    replicas.versions.commit_next()
    replicas.train(waits=(19, 20), resume=True)
    assert_equal(replicas.run, whole)


def test_cache_that_a_later_segment_does_not_fit_ends_the_run_when_it_is_saved(
    tmp_path: Path,
) -> None:
    job = write_job(tmp_path / "job", **ONCE, policy="belady", rows="225")
    versions = make_versions(tmp_path / "versions", job, [[(64, 0)], [(700, 0)]])
    replicas = FollowingReplicas(job, versions, tmp_path)
    with pytest.raises(SchemaError, match=r"replica \d failed with status 1"):
        replicas.train(waits=(1,), **CACHED)
    assert num_steps(replicas.run) == 1
    assert checkpoint_at(replicas.run, 1).is_dir()


def test_pipeline_that_has_died_ends_the_run_after_the_limit(
    job: Path, versions: list[Path], whole: Path, tmp_path: Path
) -> None:
    impatient = tmp_path / "job.yaml"
    impatient.write_text(f"{job.read_text()}  limits: {{wait: 10s}}\n")
    replicas = FollowingReplicas(impatient, versions, tmp_path)
    with pytest.raises(SchemaError, match=r"replica \d failed with status 1"):
        replicas.train(lambda _: None, ())
    assert replicas.waits_at(12)
    replicas.job = job
    replicas.train(resume=True)
    assert_equal(replicas.run, whole)


def test_replicas_wait_for_a_dataset_that_does_not_exist_yet(
    job: Path, versions: list[Path], whole: Path, tmp_path: Path
) -> None:
    replicas = FollowingReplicas(job, [], tmp_path)
    replicas.versions.remaining = iter(versions)
    messages: list[str] = []

    def progress(message: str) -> None:
        messages.append(message)
        replicas.versions.commit_next()

    replicas.train(progress=progress)
    assert messages == [f"waiting at step 0: {replicas.dataset} does not exist yet"]
    assert_equal(replicas.run, whole)


def test_second_epoch_begins_after_the_last_segment(tmp_path: Path) -> None:
    job = write_job(tmp_path / "job", epochs="2", every_steps="5")
    versions = make_versions(tmp_path / "versions", job, GROWING[1:])
    run_job(job, versions[-1], tmp_path / "whole")
    replicas = FollowingReplicas(job, versions, tmp_path)
    replicas.train(waits=(4, 7, 8), **CACHED)
    assert num_steps(replicas.run) == 20
    assert_equal(replicas.run, tmp_path / "whole")


def test_command_prints_once_what_it_waits_for_and_ends_when_asked(
    replicas: FollowingReplicas, versions: list[Path], whole: Path
) -> None:
    run, arguments = replicas.run, ("--replicas", "2", "--follow")
    process = start_training(replicas.job, replicas.dataset, run, *arguments, own_group=True)
    run_until(process, lambda: replicas.waits_at(12))
    replicas.versions.commit_next()
    run_until(process, lambda: replicas.waits_at(16))
    os.killpg(process.pid, signal.SIGTERM)
    status, messages = wait_for_end(process)
    assert status == 0, messages
    lines = [
        line for line in messages.splitlines() if line.startswith("waiting at step 12: 1 segment")
    ]
    assert len(lines) == 1
    assert messages.splitlines()[-1] == (
        f"SIGTERM: stopped at step 16; continue {run} with --resume"
    )
    commit(versions[-1], replicas.dataset)
    train_to_end(replicas.job, replicas.dataset, run, *arguments, "--resume")
    assert_equal(run, whole)
