"""How exits, steps and finished jobs become events and history."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from presage.scheduler.controller.state import JobState, PoolName, PoolProcess
from presage.scheduler.drivers.base import Endpoint, ExitStatus
from presage.scheduler.drivers.children import Children
from presage.scheduler.drivers.driver import num_gpus_of
from presage.scheduler.drivers.observations import StepTail, ended_event, record_history
from presage.scheduler.model.past_runs import PAST_JOBS, read_past_jobs
from presage.schemas.config.train import TrainConfig
from presage.schemas.run.records import METRICS, SUMMARY, StepMetric, to_line
from presage.schemas.storage.location import Location
from tests.scheduler.controller.bench import Bench
from tests.scheduler.controller.world import BUDGET, submitted
from tests.scheduler.drivers.test_children import until
from tests.scheduler.small_job import damage, paths_of


def process(pool: PoolName, name: str) -> PoolProcess:
    return PoolProcess(
        name=name, pool=pool, number=0, status="running", cpus=1.0, memory_bytes=1, began_sec=0.0
    )


def test_trainers_of_a_job_on_cuda_need_a_gpu_each() -> None:
    cuda, cpu = TrainConfig(device="cuda"), TrainConfig()
    pools: list[PoolName] = ["segment", "coordinator", "replica", "store"]
    alone = [process(pool, f"{pool}-0.1") for pool in pools]
    assert [num_gpus_of(each, cuda) for each in alone] == [0, 1, 1, 0]
    assert [num_gpus_of(each, cpu) for each in alone] == [0, 0, 0, 0]
    beside_replicas = replace(alone[1], cpus=0.0, memory_bytes=0)
    assert num_gpus_of(beside_replicas, cuda) == 0


FAILED = "error: pipeline failed: Pipeline a_1 failed in state FAILED:"
ENDINGS: dict[str, tuple[PoolName, str, bool, str, str]] = {
    "a segment job that says why it cannot": (
        "segment",
        "echo 'error: no files' >&2; exit 1",
        False,
        "failed",
        "error: no files",
    ),
    "a segment job whose cluster failed": (
        "segment",
        f"echo '{FAILED} JobException: no slot' >&2; exit 1",
        False,
        "lost",
        f"{FAILED} JobException: no slot",
    ),
    "a segment job whose step failed on a cluster": (
        "segment",
        f"echo \"{FAILED} OSError: full [while running 'write']\" >&2; exit 1",
        False,
        "failed",
        f"{FAILED} OSError: full [while running 'write']",
    ),
    "a segment job that leaves nothing": ("segment", "exit 0", False, "failed", ""),
    "a process that is killed": ("replica", "kill -9 $$", False, "lost", "signal 9"),
    "a trainer that hung": ("coordinator", "echo hung >&2; exit 4", False, "lost", "hung"),
    "a replica that is too far behind": ("replica", "exit 75", False, "lost", ""),
    "a trainer that left unasked": (
        "coordinator",
        "exit 0",
        False,
        "lost",
        "exited with status 0 before it was done",
    ),
    "a trainer that fails after its run is finished": ("coordinator", "exit 1", True, "done", ""),
}


@pytest.mark.parametrize("name", ENDINGS)
def test_ended_tells_by_what_is_left_then_by_what_was_said(name: str, tmp_path: Path) -> None:
    pool, script, finished, outcome, detail = ENDINGS[name]
    paths = paths_of(tmp_path, num_segments=2)
    if finished:
        (paths.run / SUMMARY).write_bytes(b"{}")
    children = Children(paths.processes, os.environ)
    children.start("a", ["/bin/sh", "-c", script])
    until(lambda: not children.is_alive("a"))
    found = ended_event(paths, children, "job", process(pool, "a"), 5.0)
    assert (found.outcome, found.detail) == (outcome, detail)
    # Who comes next knows no status, only what is left and was said.
    repeated = ended_event(
        paths, Children(paths.processes, os.environ), "job", process(pool, "a"), 5.0
    )
    same = outcome in ("done", "lost") or detail[:5] == "error"
    assert repeated.outcome == (outcome if same else "lost")


def test_a_segment_job_with_a_result_is_done_and_its_files_are_not_read(tmp_path: Path) -> None:
    paths = paths_of(tmp_path, num_segments=2)
    damage(paths)
    children = Children(paths.processes, os.environ)
    result = '{"built": true, "num_samples": 9, "startup_sec": 1.5, "wall_sec": 2}'
    for name, script in (("a", "exit 0"), ("b", "exit 1")):
        children.start(name, ["/bin/sh", "-c", f"echo '{result}'; {script}"])
        until(lambda name=name: not children.is_alive(name))
    found = ended_event(paths, children, "job", process("segment", "a"), 5.0)
    assert (found.outcome, found.num_samples, found.work_sec) == ("done", 9, 3.5)
    assert ended_event(paths, children, "job", process("segment", "b"), 5.0).outcome == "failed"


def test_a_trainer_that_left_as_it_was_asked_is_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = paths_of(tmp_path, num_segments=2)
    children = Children(paths.processes, os.environ)
    children.start("a", ["/bin/sh", "-c", "exit 0"])
    until(lambda: not children.is_alive("a"))
    trainer = process("coordinator", "a")
    leaving = replace(trainer, status="leaving")
    assert ended_event(paths, children, "job", leaving, 5.0).outcome == "left"
    # Evicted, it may save and leave before its notice is read.
    evicted = ExitStatus(status=0, lost="Evicted")
    monkeypatch.setattr(children, "exit_status", lambda _: evicted)
    ended = ended_event(paths, children, "job", trainer, 5.0)
    assert (ended.outcome, ended.detail) == ("left", "Evicted")


def test_a_process_of_a_damaged_dataset_failed_with_the_damage(tmp_path: Path) -> None:
    paths = paths_of(tmp_path, num_segments=2)
    damage(paths)
    children = Children(paths.processes, os.environ)
    found = ended_event(paths, children, "job", process("segment", "a"), 5.0)
    assert found.outcome == "failed"
    assert str(paths.dataset) in found.detail


def test_a_process_whose_others_are_away_is_lost_with_them_where_each_has_a_network(
    tmp_path: Path,
) -> None:
    paths = paths_of(tmp_path, num_segments=2)
    message = "error: store did not answer within 30 s: 'gone' in file:///s/address; start it"
    children = Children(paths.processes, os.environ)
    children.start("a", ["/bin/sh", "-c", f'echo "{message}" >&2; exit 1'])
    until(lambda: not children.is_alive("a"))
    coordinator = process("coordinator", "a")
    found = ended_event(paths, children, "job", coordinator, 5.0)
    assert found.outcome == "failed", "nobody moves here"
    children.endpoint = Endpoint(host="h", folder="/f", name="n")
    found = ended_event(paths, children, "job", coordinator, 5.0)
    assert (found.outcome, found.detail) == ("lost", message)


def line(step: int, samples: int, seconds: float) -> str:
    metric = StepMetric(
        step=step,
        loss=0.5,
        num_samples=samples,
        num_replicas=1,
        samples_per_sec=samples / seconds,
        phases={},
    )
    return to_line(metric) + "\n"


def test_step_tail_tells_whole_lines_once_and_begins_anew_when_the_run_went_back(
    tmp_path: Path,
) -> None:
    tail, path = StepTail(Location.parse(tmp_path)), tmp_path / METRICS
    assert tail.read("a", 1.0) is None
    lines = [line(step, 100, 0.5) for step in range(4)]
    path.write_text(lines[0] + lines[1] + lines[2][:20])
    found = tail.read("a", 1.0)
    assert found is not None
    assert (found.next_step, found.num_samples, found.seconds) == (2, 200, (0.5,))
    assert tail.read("a", 1.0) is None
    path.write_text("".join(lines))
    found = tail.read("a", 2.0)
    assert found is not None
    assert (found.next_step, found.num_samples, found.seconds) == (4, 400, (0.5, 0.5))
    path.write_text(lines[0])
    found = tail.read("a", 3.0)
    assert found is not None
    assert (found.next_step, found.num_samples) == (1, 100)
    path.write_text(line(0, 90, 0.25) + "".join(lines[1:]))
    found = tail.read("a", 4.0)
    assert found is not None
    assert (found.next_step, found.num_samples) == (4, 390)


def finished_job(num_steps: int) -> JobState:
    bench = Bench(BUDGET, submitted("first"))
    bench.built(0)
    if num_steps:
        bench.stepped(num_steps, 0.5)
    return bench.job


def test_teach_writes_what_a_job_taught_once_in_the_place_of_a_torn_line(tmp_path: Path) -> None:
    job = finished_job(8)
    (tmp_path / PAST_JOBS).write_text('{"name":')
    record_history(job, tmp_path)
    record_history(job, tmp_path)
    record_history(replace(job, steps=finished_job(0).steps), tmp_path)
    (past,) = read_past_jobs(tmp_path / PAST_JOBS)
    assert past.name == "first"
    assert past.step_ratio > 1
