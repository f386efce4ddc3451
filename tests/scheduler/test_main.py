"""The command: what it prints, and one line for each mistake."""

import json
import math
import re
from pathlib import Path

import pytest

from presage.scheduler.__main__ import main
from presage.scheduler.model.past_runs import read_history
from presage.schemas.run.records import SUMMARY
from tests.scheduler.small_job import write_job, write_run
from tests.shared import json_of, output_of, printed_by, refusal_of

POOLS = {
    "preprocessing": {"segment_jobs", "workers_per_job", "cpus", "memory_bytes", "rows_per_sec"},
    "training": {"num_replicas", "num_stores", "cpus", "memory_bytes", "samples_per_sec"},
}


def write_build(path: Path, rows_per_sec: float) -> None:
    """Leave what `pipelines build --json` prints."""
    body = {"num_samples": 50_000, "startup_sec": 2.0, "rows_per_sec": rows_per_sec}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(body))


def test_main_plan_json_prints_one_object_with_every_key(tmp_path: Path) -> None:
    job = write_job(tmp_path, "  budget: {cpus: 16, memory: 64GiB}")
    printed, explanation = printed_by(main, ["plan", str(job), "--json", "--explain"], 0)
    assert printed.count("\n") == 1
    body = json.loads(printed)
    for pool, keys in POOLS.items():
        assert keys <= set(body[pool])
        assert all(math.isfinite(value) for value in body[pool].values())
    assert body["predicted_sec"] > 0
    assert body["cost_per_hour"] > 0
    assert body["cost"] > 0
    assert body["confident"] is False
    assert len(body["reasons"]) == 6
    assert "runner-up" in body["reasons"][0]
    assert "preprocessing" in explanation


def test_main_plan_explain_prints_pools_and_reasons(tmp_path: Path) -> None:
    job = write_job(tmp_path, "  budget: {cpus: 16, memory: 64GiB}")
    out = output_of(main, ["plan", str(job), "--explain"])
    for text in ("samples/s", "rows/s", "runner-up", "low confidence", "balance", "rule: the"):
        assert text in out


def test_main_plan_with_history_predicts_what_was_measured(tmp_path: Path) -> None:
    schedule = "  training: {max_replicas: 1}\n  preprocessing: {max_workers: 1}"
    job = write_job(tmp_path, schedule)
    write_run(tmp_path / "history" / "runs" / "dedup", sec=0.032)
    write_build(tmp_path / "history" / "build.json", rows_per_sec=4_000)
    body = json_of(main, ["plan", str(job), "--history", str(tmp_path / "history"), "--json"])
    assert body["training"]["samples_per_sec"] == pytest.approx(8_000)  # pyright: ignore
    # 100,000 samples in 6 segments of one job: each starts anew, is noticed, makes 4,000 rows/s
    assert body["preprocessing"]["rows_per_sec"] == pytest.approx(100_000 / (6 * 2.5 + 25))  # pyright: ignore
    assert body["predicted_sec"] == pytest.approx(6 * 2.5 + 25 + 100_000 / 6 / 8_000)


def test_main_plan_without_finished_runs_uses_the_defaults(tmp_path: Path) -> None:
    job = write_job(tmp_path)
    write_run(tmp_path / "history" / "a", sec=0.5)
    (tmp_path / "history" / "a" / SUMMARY).unlink()
    body = json_of(main, ["plan", str(job), "--history", str(tmp_path / "history"), "--json"])
    assert body == json_of(main, ["plan", str(job), "--json"])


def test_main_plan_over_budget_names_the_smallest_budget(tmp_path: Path) -> None:
    job = write_job(tmp_path, "  budget: {cpus: 1, memory: 8GiB}")
    assert refusal_of(main, ["plan", str(job)]) == (
        "budget does not hold the smallest pools: cpus=1 and memory=8192MiB; use at least "
        "cpus=2 and memory=4096MiB (workers=1, replicas=1, stores=0)"
    )


@pytest.mark.parametrize("text", ["{}", "[]", "{", '{"startup_sec": 2, "rows_per_sec": "fast"}'])
def test_main_plan_with_a_damaged_build_names_it(tmp_path: Path, text: str) -> None:
    job = write_job(tmp_path)
    (tmp_path / "build.json").write_text(text)
    message = refusal_of(main, ["plan", str(job), "--history", str(tmp_path)])
    assert re.match("file is not the output of build --json: ", message)
    assert f"in {tmp_path / 'build.json'}; build again or remove it" in message


def test_main_plan_leaves_out_a_build_that_found_its_segment_there(tmp_path: Path) -> None:
    body = {"startup_sec": 2, "rows_per_sec": None, "built": False}
    (tmp_path / "build.json").write_text(json.dumps(body))
    assert read_history(tmp_path).builds == ()


def test_main_plan_with_a_build_without_a_rate_names_it(tmp_path: Path) -> None:
    job = write_job(tmp_path)
    body = {"num_samples": 9, "startup_sec": 2, "rows_per_sec": 0}
    (tmp_path / "build.json").write_text(json.dumps(body))
    message = refusal_of(main, ["plan", str(job), "--history", str(tmp_path)])
    assert message == (
        "build must have rows_per_sec above 0 and startup_sec from 0, got 0.0 and 2.0 "
        f"in {tmp_path / 'build.json'}; build again or remove it"
    )


def test_main_plan_with_missing_paths_names_them(tmp_path: Path) -> None:
    job = write_job(tmp_path)
    nowhere = tmp_path / "nowhere"
    assert refusal_of(main, ["plan", str(job), "--history", str(nowhere)]) == (
        f"history is not a folder in {nowhere}; check the path"
    )
    assert "there is no dataset" in refusal_of(main, ["plan", str(job), "--dataset", str(nowhere)])
    assert "there is no job file" in refusal_of(main, ["plan", str(nowhere)])


def test_main_plan_reads_a_schema_outside_the_folder_with_the_flag_alone(tmp_path: Path) -> None:
    (tmp_path / "jobs").mkdir()
    job = write_job(tmp_path / "jobs")
    (tmp_path / "jobs" / "schema.pbtxt").rename(tmp_path / "schema.pbtxt")
    text = job.read_text()
    job.write_text(text.replace("data:\n", "data:\n  schema: ../schema.pbtxt\n", 1))
    assert refusal_of(main, ["plan", str(job)]) == (
        f"data.schema must be in the folder of the job file, got '../schema.pbtxt' in {job}; "
        "copy it there, or give --allow-outside"
    )
    assert main(["plan", str(job), "--allow-outside"]) == 0
