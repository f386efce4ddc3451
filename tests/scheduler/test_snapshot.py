"""What a snapshot says of a real dataset equals what the raw log says."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from presage.pipelines.build import build, record_build_speed
from presage.pipelines.cli import main as build_command
from presage.pipelines.demo_log.generate import GeneratorConfig, write_log
from presage.pipelines.prepare import BuildInput, BuildOptions, BuildRequest
from presage.pipelines.table.target import SegmentTarget
from presage.pipelines.table.verify import verify
from presage.scheduler.__main__ import main
from presage.scheduler.drivers.job_files import read_load
from presage.scheduler.model.past_runs import History
from presage.scheduler.model.plan_inputs import VALUE_BYTES, DataFacts, take_snapshot
from presage.schemas.config.job import Job, load_job
from presage.schemas.dataset.opened import open_dataset
from presage.schemas.dataset.run_next_uses import indexed_steps
from presage.schemas.oracle.cache_plan import plan_table, summarize
from presage.schemas.rows import rows_of_ids
from presage.schemas.run.records import RUN_FILE
from presage.schemas.storage.location import Location
from tests.scheduler.small_job import paths_of, write_job, write_run
from tests.shared import error_of, json_of, output_of


@pytest.fixture(scope="module")
def demo_job(repository: Path) -> Path:
    return repository / "schemas" / "demo" / "job.yaml"


@pytest.fixture(scope="module")
def built(demo_job: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the demo's `log/`, its `dataset/` and what the build printed."""
    root = tmp_path_factory.mktemp("built")
    config = load_job(demo_job).data.generate
    assert config is not None
    generator = GeneratorConfig(
        num_samples=5_000, seed=config.seed, start=config.start, span=config.span
    )
    write_log(generator, root / "log")
    request = BuildRequest(
        BuildInput(demo_job, root / "log"),
        SegmentTarget(Location.parse(root / "dataset"), "a"),
        BuildOptions([]),
    )
    (root / "build.json").write_text(json.dumps({**build(request), "startup_sec": 1.5}))
    return root


@pytest.fixture(scope="module")
def job(demo_job: Path) -> Job:
    return load_job(demo_job)


@pytest.fixture(scope="module")
def log(built: Path) -> pa.Table:
    return pa.concat_tables(pq.read_table(p) for p in sorted((built / "log").rglob("*.parquet")))


@pytest.fixture(scope="module")
def training(log: pa.Table, job: Job) -> pa.Table:
    """The rows of the log before the evaluation range."""
    start = np.datetime64(job.data.split.evaluation_from, "us")
    return log.filter(pa.array(log["time"].to_numpy() < start))


@pytest.fixture(scope="module")
def facts(demo_job: Path, built: Path) -> DataFacts:
    return take_snapshot(demo_job, built / "dataset", None).facts


def values_of(column: pa.ChunkedArray) -> np.ndarray:
    """Return all values of a column, those of lists one after the other."""
    array = pa.concat_arrays(column.chunks)
    flat = array.flatten() if pa.types.is_nested(array.type) else array
    return flat.drop_null().to_numpy(zero_copy_only=False)


@pytest.mark.slow
def test_facts_of_dataset_count_samples_as_the_log(
    facts: DataFacts, log: pa.Table, training: pa.Table
) -> None:
    assert (facts.num_samples, facts.num_train_samples) == (len(log), len(training))
    assert 0 < len(training) < len(log)
    assert facts.measured


@pytest.mark.slow
def test_facts_of_dataset_hold_the_rows_that_the_log_touches(
    facts: DataFacts, training: pa.Table, job: Job
) -> None:
    wanted = {
        name: len(
            np.unique(
                np.concatenate(
                    [rows_of_ids(values_of(training[f]), name, table) for f in table.features]
                )
            )
        )
        for name, table in job.data.tables.items()
    }
    assert facts.table_rows == wanted


def test_facts_of_dataset_hold_the_bytes_of_the_log_and_of_made_columns(
    facts: DataFacts, log: pa.Table, job: Job
) -> None:
    values = sum(len(values_of(log[name])) for name in log.column_names)
    derived = sum(len(columns) for columns in job.data.transforms.values())
    assert facts.row_bytes == pytest.approx(VALUE_BYTES * (values / len(log) + derived))


def test_facts_of_dataset_bound_the_rows_of_a_step(
    facts: DataFacts, training: pa.Table, job: Job
) -> None:
    lookups = sum(len(values_of(training[f])) for t in job.data.tables.values() for f in t.features)
    per_sample = lookups / len(training)
    assert 0 < facts.lookups_per_sample < per_sample
    assert (
        0
        < facts.rows_per_step
        < min(sum(facts.table_rows.values()), per_sample * job.train.batch_samples)
    )


def test_facts_of_dataset_bound_the_largest_session_to_two_blocks(
    facts: DataFacts, log: pa.Table, job: Job
) -> None:
    sessions = pa.TableGroupBy(log, job.data.session.key).aggregate([([], "count_all")])
    largest = max(sessions["count_all"].to_pylist())
    assert largest <= facts.session_rows <= largest + 2 * job.data.block_samples


def test_facts_of_dataset_hold_what_the_plan_of_the_run_needs(
    facts: DataFacts, built: Path, job: Job
) -> None:
    dataset = open_dataset(built / "dataset")
    index, cache = dataset.open_index(dataset.manifest.indexes[0]), job.train.cache
    order = index.order
    assert index.entry.batch_samples == job.train.batch_samples
    plans = [
        summarize(plan_table(indexed_steps(dataset, index, table), cache))
        for table in job.data.tables
    ]
    assert facts.window_rows == sum(found.peak_cache_rows for found in plans)
    fetched = sum(found.fetched_rows for found in plans)
    assert facts.fetched_rows_per_step == pytest.approx(fetched / order.num_steps)


@pytest.mark.slow
def test_load_of_the_index_counts_the_accesses_and_rows_of_all_tables(
    facts: DataFacts, built: Path, job: Job
) -> None:
    load = read_load(paths_of(built), "first", job.train, 0.0)
    assert load is not None
    dataset = open_dataset(built / "dataset")
    index = dataset.open_index(dataset.manifest.indexes[0])
    assert sum(map(sum, load.slots)) == sum(map(index.num_accesses, job.data.tables))
    assert load.touched_rows[-1] == sum(facts.table_rows.values())
    larger = replace(job.train, batch_samples=2 * job.train.batch_samples)
    assert read_load(paths_of(built), "first", larger, 0.0) is None


def test_facts_of_job_alone_bound_those_of_the_dataset(demo_job: Path, facts: DataFacts) -> None:
    guessed = take_snapshot(demo_job, None, None).facts
    assert not guessed.measured
    assert all(guessed.table_rows[name] >= rows for name, rows in facts.table_rows.items())
    assert guessed.rows_per_step >= facts.rows_per_step
    assert guessed.row_bytes >= facts.row_bytes
    assert (guessed.num_dense, guessed.num_sparse) == (facts.num_dense, facts.num_sparse)


def test_take_snapshot_reads_builds_below_the_history(demo_job: Path, built: Path) -> None:
    history = take_snapshot(demo_job, None, built).history
    printed = json.loads((built / "build.json").read_text())
    assert [b.rows_per_sec for b in history.builds] == [printed["rows_per_sec"]]
    assert history.runs == ()


@pytest.mark.slow
def test_plan_right_after_a_build_finds_it_and_the_runs_beside_the_dataset(
    demo_job: Path, built: Path, tmp_path: Path
) -> None:
    dataset = tmp_path / "dataset"
    shutil.copytree(built / "dataset", dataset)
    assert take_snapshot(demo_job, dataset, None).history == History()
    printed = json.loads((built / "build.json").read_text())
    record_build_speed(Location.parse(dataset), printed, [])
    workers = ["--direct_num_workers=2", "--direct_running_mode=multi_processing"]
    later = {**printed, "segment": "00001-later", "rows_per_sec": 100.0}
    record_build_speed(Location.parse(dataset), later, workers)
    record_build_speed(Location.parse(dataset), {**printed, "built": False}, [])
    trained = [segment.manifest_sha256 for segment in open_dataset(dataset).manifest.segments]
    write_trained_run(tmp_path / "run", trained)
    write_trained_run(tmp_path / "runs" / "first", trained)
    write_trained_run(tmp_path / "runs" / "of-another-dataset", ["0f"])
    found = take_snapshot(demo_job, dataset, None).history
    assert [(b.rows_per_sec, b.num_workers) for b in found.builds] == [
        (printed["rows_per_sec"], 1),
        (100.0, 2),
    ]
    assert [run.name for run in found.runs] == ["run", "runs/first"]
    assert verify(dataset)["problems"] == []


def write_trained_run(folder: Path, segments: list[str]) -> None:
    write_run(folder, 0.1)
    (folder / RUN_FILE).write_text(json.dumps({"segments": segments}))


@pytest.mark.slow
def test_main_build_leaves_what_the_next_plan_reads(tmp_path: Path) -> None:
    job = write_job(tmp_path)
    rows = pa.table(
        {
            "session_id": list(range(600)),
            "time": pa.array(range(600), pa.timestamp("s")),
            "clicked": [0, 1] * 300,
            "user_id": [1, 2, 3] * 200,
            "item_id": list(range(600)),
            "clicked_items": [[1, 2]] * 600,
            "item_price": [1.0] * 600,
        }
    )
    (tmp_path / "log").mkdir()
    pq.write_table(rows, tmp_path / "log" / "a.parquet")
    dataset = tmp_path / "dataset"
    words = ["build", str(job), "--input", str(tmp_path / "log"), "--output", str(dataset)]
    printed = json_of(build_command, [*words, "--json"])
    history = take_snapshot(job, dataset, None).history
    assert [(b.rows_per_sec, b.startup_sec) for b in history.builds] == [
        (printed["rows_per_sec"], printed["startup_sec"])
    ]
    assert "no build was measured" not in output_of(
        main, ["plan", str(job), "--dataset", str(dataset), "--explain"]
    )


def test_main_plan_with_a_dataset_plans_it(demo_job: Path, built: Path) -> None:
    arguments = ["--dataset", str(built / "dataset"), "--history", str(built)]
    body = json_of(main, ["plan", str(demo_job), *arguments, "--json"])
    assert body["preprocessing"]["segment_jobs"] == 1
    assert "no run was measured" in body["reasons"][-1]
    assert "no build was measured" not in body["reasons"][-1]
    assert "from a dataset" not in body["reasons"][-1]


def test_main_plan_with_the_dataset_of_another_job_names_the_table(
    tmp_path: Path, built: Path
) -> None:
    job = write_job(tmp_path)
    text = job.read_text().replace("    users: {", "    visitors: {")
    job.write_text(text)
    message = error_of(main, ["plan", str(job), "--dataset", str(built / "dataset")])
    assert message.startswith("error: dataset lacks a table of the job: ")
    assert "'visitors'" in message


def test_main_plan_with_a_changed_byte_refuses_the_dataset(
    tmp_path: Path, demo_job: Path, built: Path
) -> None:
    dataset = open_dataset(built / "dataset")
    changed = tmp_path / "dataset"
    for path in sorted(Path(dataset.directory).rglob("*")):
        target = changed / path.relative_to(dataset.directory)
        if path.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(path.read_bytes())
    manifest = changed / "segments" / dataset.segments[0].directory.name / "MANIFEST.json"
    manifest.write_bytes(manifest.read_bytes().replace(b'"num_samples": 5', b'"num_samples": 6'))
    assert "manifest must have sha256" in error_of(
        main, ["plan", str(demo_job), "--dataset", str(changed)]
    )
