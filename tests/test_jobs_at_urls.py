"""A job file and its schema at a URL mean what they mean in a folder, for every command."""

from __future__ import annotations

import json
import shutil
import uuid
from pathlib import Path

import pytest

from presage.pipelines import cli as pipelines
from presage.scheduler import __main__ as scheduler
from presage.schemas.config.job import load_job
from presage.schemas.dataset.manifest import read_root
from presage.schemas.dataset.opened import open_dataset
from presage.schemas.errors import SchemaError
from presage.schemas.features import load_features
from presage.schemas.paths import resolve_beside, schema_path
from presage.schemas.storage.location import Location
from presage.trainer import __main__ as trainer
from presage.trainer.stores.factory import token_file_of
from tests.object_store import Store
from tests.pipelines import logs
from tests.scheduler import small_job
from tests.shared import Main
from tests.trainer.make_dataset import write_job
from tests.trainer.runs import small_dataset

pytestmark = pytest.mark.nightly

SHIPPED = ("demo", "ebnerd", "kuairand", "mind", "thirtymusic")


def at_url(folder: Path, url: str | None = None) -> str:
    """Copy a folder with a job to a URL; return the URL of the job file."""
    target = Location.parse(url or f"memory://bucket/{uuid.uuid4().hex}")
    for entry in Location.parse(folder).entries():
        (target / entry.path).upload(folder / entry.path)
    return f"{target}/job.yaml"


def run(main: Main, line: str, job: Path | str, output: Path) -> int:
    """Run a command in which JOB and OUT stand for the paths."""
    return main([{"JOB": str(job), "OUT": str(output)}.get(word, word) for word in line.split()])


@pytest.mark.parametrize("name", SHIPPED)
def test_job_and_schema_at_a_url_are_those_of_the_folder(name: str, repository: Path) -> None:
    path = repository / "schemas" / name / "job.yaml"
    url = Location.parse(at_url(path.parent))
    job = load_job(path)
    assert load_job(url) == load_job(str(url)) == job
    schema = schema_path(url, job.data.schema)
    assert load_features(schema) == load_features(path.parent / job.data.schema)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("data:", "dota:"),
        ("block_samples: 16", "block_samples: 17"),
        ("session: {key", "session: {kay"),
        ("groups:", "groups: ["),
        ("batch_samples: 256\n", "batch_samples: 100\n"),
        ("name: small", "name: \udcff"),
    ],
)
def test_error_in_a_job_at_a_url_differs_in_its_name_alone(
    old: str, new: str, tmp_path: Path
) -> None:
    path = small_job.write_job(tmp_path)
    text = path.read_text().replace(old, new)
    path.write_bytes(text.encode(errors="surrogateescape"))
    url = at_url(tmp_path)
    messages = list[str]()
    for job in (str(path), url):
        with pytest.raises(SchemaError) as error:
            load_job(job)
        messages.append(str(error.value))
    assert messages[0].replace(str(path), url) == messages[1]
    assert url in messages[1]
    assert "\n" not in messages[1]


def test_missing_job_and_schema_at_a_url_are_named_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small_job.write_job(tmp_path)
    (tmp_path / "schema.pbtxt").unlink()
    url = at_url(tmp_path)
    schema, nowhere = url.replace("job.yaml", "schema.pbtxt"), f"{url}.x"
    for job, message in (
        (url, f"no such object: '{schema}' in {schema}"),
        (nowhere, f"there is no job file {nowhere}; check the path"),
    ):
        assert run(pipelines.main, "preview JOB --input OUT", job, tmp_path) == 1
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1


def test_schema_outside_the_folder_of_a_url_needs_a_flag() -> None:
    job = Location("s3://bucket/jobs/job.yaml")
    assert schema_path(job, "a/../schema.pbtxt") == Location("s3://bucket/jobs/schema.pbtxt")
    for schema, full in (
        ("../x.pbtxt", "s3://bucket/x.pbtxt"),
        ("../../../x.pbtxt", "s3://bucket/x.pbtxt"),
        ("/etc/x.pbtxt", "/etc/x.pbtxt"),
        ("gs://other/x.pbtxt", "gs://other/x.pbtxt"),
    ):
        for path in (job, Path("jobs/job.yaml")):
            with pytest.raises(SchemaError, match=r"data\.schema must be in the folder") as error:
                schema_path(path, schema)
            assert f"in {path}; copy it there, or give --allow-outside" in str(error.value)
        assert str(schema_path(job, schema, allow_outside=True)) == full
    assert resolve_beside(Location("s3://bucket/job.yaml"), "x") == Location("s3://bucket/x")


def test_token_beside_a_job_at_a_url_is_refused(tmp_path: Path) -> None:
    stores = 'train:\n  stores: {addresses: ["grpc://a:1"], token_file: TOKEN}\n'
    path = small_job.write_job(tmp_path)
    text = path.read_text()
    for token, is_refused in (("token", True), ("/etc/token", False)):
        path.write_text(text.replace("train:\n", stores.replace("TOKEN", token)))
        url = Location.parse(at_url(tmp_path))
        config = load_job(url).train.stores
        assert token_file_of(config, path) == tmp_path / token
        if not is_refused:
            assert token_file_of(config, url) == Path(token)
            continue
        with pytest.raises(SchemaError, match=r"token_file must be a local path, got memory://"):
            token_file_of(config, url)


def build_both(folder: Path, url: str, output: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Build and append from the path and from the URL of a job; compare what is committed."""
    path, log = folder / "job.yaml", folder.parent / "log"
    logs.write_log(log)
    logs.write_log(folder.parent / "more", seed=1)
    roots = list[object]()
    for job, dataset in ((str(path), str(folder.parent / "dataset")), (url, output)):
        words = ["--output", dataset, "--input", str(log), "--runner", "InProcess"]
        assert pipelines.main(["build", job, *words]) == 0, capsys.readouterr().err
        words = ["--dataset", dataset, "--input", str(folder.parent / "more"), "--json"]
        assert pipelines.main(["append", job, *words]) == 0, capsys.readouterr().err
        roots.append(logs.without_attempts(read_root(dataset).manifest))
        assert open_dataset(dataset).job == load_job(path)
    assert roots[0] == roots[1]


def test_preview_of_a_job_at_a_url_is_equal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = logs.write_job(tmp_path / "job")
    logs.write_log(tmp_path / "log")
    printed = list[dict[str, object]]()
    for job in (path, at_url(path.parent)):
        assert run(pipelines.main, "preview JOB --input OUT --json", job, tmp_path / "log") == 0
        printed.append({**json.loads(capsys.readouterr().out), "wall_sec": 0})
    assert printed[0] == printed[1]


@pytest.mark.slow
def test_dataset_built_from_a_job_at_s3_is_equal(
    s3_store: Store,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in s3_store.environment.items():
        monkeypatch.setenv(name, value)
    url = s3_store.new_url()
    logs.write_job(tmp_path / "job")
    job = at_url(tmp_path / "job", f"{url}/job")
    build_both(tmp_path / "job", job, f"{url}/dataset", capsys)


@pytest.mark.slow
def test_run_of_a_job_at_a_url_is_equal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, dataset = write_job(tmp_path / "job"), small_dataset()
    evaluations = list[str]()
    for job, name in ((str(path), "run"), (at_url(path.parent), "other")):
        words = ["--dataset", str(dataset), "--output", str(tmp_path / name), "--steps", "3"]
        assert trainer.main(["train", job, *words]) == 0, capsys.readouterr().err
        assert (tmp_path / name / "job.yaml").read_bytes() == path.read_bytes()
        capsys.readouterr()
        words = ["--dataset", str(dataset), "--run", str(tmp_path / name), "--json"]
        assert trainer.main(["evaluate", job, *words]) == 0
        evaluations.append(capsys.readouterr().out)
    assert evaluations[0] == evaluations[1]
    assert trainer.main(["diff", str(tmp_path / "run"), str(tmp_path / "other")]) == 0


@pytest.mark.parametrize(
    "line",
    [
        "plan JOB --json",
        "run JOB --input LOG --output OUT --dry-run --driver process",
        "retrain JOB --list --json",
    ],
)
def test_scheduler_reads_a_job_at_a_url(
    line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "job").mkdir()
    path = small_job.write_job(tmp_path / "job", "  retrain: {output: days}")
    logs.write_log(tmp_path / "log")
    printed = list[str]()
    for job in (str(path), at_url(path.parent)):
        words = line.replace("LOG", str(tmp_path / "log"))
        assert run(scheduler.main, words, job, tmp_path / "out") == 0, capsys.readouterr().err
        printed.append(capsys.readouterr().out)
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
    assert printed[0].replace(str(path), job) == printed[1]


def test_paths_of_a_job_at_a_url_start_at_its_folder(tmp_path: Path) -> None:
    from presage.scheduler.retrain.retrain import _root_of

    small_job.write_job(tmp_path, "  retrain: {output: ../days}")
    url = at_url(tmp_path)
    arguments = scheduler.build_parser().parse_args(["retrain", url, "--list"])
    root = _root_of(arguments, load_job(url))
    assert root.location == Location.parse(url).parent.parent / "days"


ALL_AT_URLS: tuple[tuple[Main, str], ...] = (
    (pipelines.main, "generate URL/demo/job.yaml --num-samples 300 --output URL/demo-log"),
    (pipelines.main, "init URL/demo-log --output URL/demo-job"),
    (pipelines.main, "preview URL/demo-job/job.yaml --input URL/demo-log"),
    (pipelines.main, "build URL/job/job.yaml --input URL/log --output URL/dataset RUNNER"),
    (pipelines.main, "append URL/job/job.yaml --input URL/more --dataset URL/dataset RUNNER"),
    (pipelines.main, "oracle URL/dataset --hints URL/hints.json"),
    (pipelines.main, "oracle URL/dataset --reindex --batch-samples 32 --epochs 2"),
    (pipelines.main, "erase URL/dataset --ids URL/ids.txt --rewrite"),
    (trainer.main, "train URL/job/job.yaml --dataset URL/dataset --output URL/run --steps 1"),
    (trainer.main, "export URL/run --output URL/model"),
    (pipelines.main, "score URL/model --dataset URL/dataset --output URL/scores"),
    (pipelines.main, "expand URL/dataset --output URL/samples.parquet"),
    (pipelines.main, "report URL/dataset --runs URL/run --html URL/report.html"),
    (pipelines.main, "seal URL/dataset"),
    (pipelines.main, "unseal URL/dataset"),
    (pipelines.main, "vacuum URL/dataset"),
    (pipelines.main, "verify URL/dataset"),
    (pipelines.main, "rewrite URL/log --output URL/smaller RUNNER"),
)
"""Every argument of `pipelines` that names a file or directory, in an order in which they work."""


@pytest.mark.slow
def test_every_path_of_pipelines_may_be_at_s3(
    repository: Path,
    s3_store: Store,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in s3_store.environment.items():
        monkeypatch.setenv(name, value)
    url = s3_store.new_url()
    at_url(repository / "schemas" / "demo", f"{url}/demo")
    logs.write_job(tmp_path / "made" / "job")
    logs.write_log(tmp_path / "made" / "log")
    logs.write_log(tmp_path / "made" / "more", seed=1)
    at_url(tmp_path / "made", url)
    (Location.parse(url) / "ids.txt").write_bytes(b"3\n5\n")
    shutil.rmtree(tmp_path / "made")
    monkeypatch.chdir(tmp_path)
    for main, line in ALL_AT_URLS:
        words = line.replace("URL", url).replace("RUNNER", logs.IN_PROCESS).split()
        assert main(words) == 0, f"{line}: {capsys.readouterr().err}"
        capsys.readouterr()
    written = {entry.path.partition("/")[0] for entry in Location.parse(url).entries()}
    assert written >= {"demo-job", "hints.json", "model", "scores", "samples.parquet"}
    assert written >= {"report.html", "smaller", "run"}
    assert list(tmp_path.iterdir()) == []
