"""A run at a URL: trained in a work folder, uploaded beside training, and read from anywhere."""

from __future__ import annotations

import itertools
import json
import shutil
import tempfile
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from presage.pipelines.report.facts import read_runs
from presage.scheduler.model.past_runs import BUILD, read_history
from presage.schemas.config.train import CheckpointConfig
from presage.schemas.dataset.files import replace_bytes
from presage.schemas.dataset.manifest import encode_manifest
from presage.schemas.errors import SchemaError
from presage.schemas.run.records import (
    CHECKPOINT_LOG,
    CHECKPOINTS,
    LEDGER,
    METRICS,
    RUN_FILE,
    SUMMARY,
)
from presage.schemas.run.run_manifest import (
    ALL,
    OBJECTS,
    RunLogTail,
    RunManifest,
    RunObject,
    fetch_run,
    local_run,
    read_newest_state,
)
from presage.schemas.run.scoring import load_model
from presage.schemas.storage.location import MANIFESTS, Location, StorageError
from presage.schemas.storage.versions import Versions
from presage.trainer.__main__ import main
from presage.trainer.checkpoint.files import complete_checkpoints
from presage.trainer.checkpoint.load import newest_checkpoint, verify_checkpoint
from presage.trainer.recovery import Drain, DrainInterrupt
from presage.trainer.run import upload
from presage.trainer.run.compare import compare_runs
from presage.trainer.run.folder import read_identity
from presage.trainer.run.upload import MERGED_BYTES, RunUploader, work_folder
from tests.shared import hard_links, make_once
from tests.trainer.daily import DATES, make_days, run_days
from tests.trainer.make_dataset import write_job
from tests.trainer.runs import rows_in, run_job, small_dataset
from tests.trainer.url_runs import (
    check_equal,
    check_objects,
    memory_url,
    newest_of,
    newest_state,
    train_at,
)

pytestmark = pytest.mark.slow

LAST_STEP = 31
"""Of a run of two epochs."""


@pytest.fixture(autouse=True)
def _without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upload, "POLL_SEC", 0.01)


@pytest.fixture
def url() -> str:
    return memory_url()


def _folder_run(folder: Path) -> None:
    job = write_job(folder / "job", every_steps="4")
    job.write_text(job.read_text().replace("keep: 20", "keep: 3"))
    run_job(job, small_dataset(), folder / "run")


@pytest.fixture(scope="module")
def folder() -> Path:
    """A folder with a job and its run, saved every four steps, which no test changes."""
    return make_once(_folder_run)


@pytest.fixture
def job(folder: Path) -> Path:
    return folder / "job" / "job.yaml"


@pytest.fixture(scope="module")
def finished_url(folder: Path) -> str:
    """A URL with the state of the run, which no test changes."""
    url = memory_url()
    upload_state(folder / "run", url)
    return url


def upload_state(run: Path, url: str) -> None:
    """Upload a copy of a run, in which an upload leaves a manifest."""
    newest = read_newest_state(Location.parse(url))
    with tempfile.TemporaryDirectory() as directory:
        copy = hard_links(run, Path(directory) / "run")
        RunUploader(copy, Location.parse(url), newest).commit()


class UrlRun:
    """A run at a URL, which is to have the bits of one in a folder."""

    def __init__(self, folder: Path, url: str, scratch: Path) -> None:
        self._folder, self._url, self._scratch = folder, url, scratch

    def train(self, work: str, **options: Any) -> None:
        """Train as a host with a work folder of some name."""
        job = self._folder / "job" / "job.yaml"
        train_at(self._url, self._scratch / work, job, small_dataset(), **options)

    def check(self) -> None:
        """Check that the run has the bits of the one in the folder, and is complete."""
        check_equal(self._url, self._folder / "run", self._scratch / "copy")


@pytest.fixture
def at_url(folder: Path, url: str, tmp_path: Path) -> UrlRun:
    return UrlRun(folder, url, tmp_path)


def stop_at(step: int) -> Any:
    return lambda current, drain: drain.ask("test") if current == step else None


def test_run_at_a_url_equals_a_run_in_a_folder(
    at_url: UrlRun, folder: Path, job: Path, dataset: Path, url: str, tmp_path: Path
) -> None:
    words = ["train", job, "--dataset", dataset, "--output", url, "--work", tmp_path / "work"]
    assert main([str(word) for word in words]) == 0
    assert main(["diff", url, str(folder / "run")]) == 0
    at_url.check()
    names, others = (
        {str(p.relative_to(run)) for p in run.rglob("*")}
        for run in (folder / "run", tmp_path / "copy")
    )
    assert names - others == {"checkpoints.lock"}
    assert others - names == set()
    assert [path for path in (tmp_path / "work").iterdir() if path.is_dir()] == []


@pytest.mark.parametrize("embedding", ["plain", "cached"])
def test_run_that_is_stopped_continues_on_a_machine_that_has_only_the_url(
    at_url: UrlRun, embedding: str, url: str
) -> None:
    options: dict[str, Any] = {"embedding": embedding}
    with pytest.raises(DrainInterrupt) as interrupt:
        at_url.train("a", on_step=stop_at(9), **options)
    assert interrupt.value.message == f"stopped at step 10; continue {url} with --resume"
    at_url.train("b", resume=True, **options)
    at_url.check()


def test_run_continues_in_its_work_folder_without_fetching(
    at_url: UrlRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(DrainInterrupt):
        at_url.train("work", on_step=stop_at(9))
    monkeypatch.setattr(upload, "fetch_run", lambda *_: pytest.fail("nothing is fetched"))
    at_url.train("work", resume=True)
    at_url.check()


def test_work_folder_of_an_older_state_is_replaced(at_url: UrlRun, url: str) -> None:
    steps: list[int] = []

    def stop(step: int, drain: Drain) -> None:
        steps.append(step)
        stop_at(last_step)(step, drain)

    for work, last_step in (("a", 6), ("b", 13), ("a", 18)):  # noqa: B007 # read by `stop`
        resume = read_newest_state(Location.parse(url)) is not None
        with pytest.raises(DrainInterrupt):
            at_url.train(work, on_step=stop, resume=resume)
    assert steps == list(range(19)), "each continues where the one before has ended"
    at_url.train("b", resume=True)
    at_url.check()


def test_run_that_nothing_was_uploaded_of_continues_in_its_work_folder(
    at_url: UrlRun, url: str, tmp_path: Path
) -> None:
    with pytest.raises(DrainInterrupt):
        at_url.train("work", on_step=stop_at(9))
    [work] = [path for path in (tmp_path / "work").iterdir() if path.is_dir()]
    shutil.rmtree(work / MANIFESTS)
    Location.parse(url).remove_all()
    with pytest.raises(SchemaError, match="work folder has a run whose upload did not begin"):
        at_url.train("work")
    at_url.train("work", resume=True)
    at_url.check()


def test_each_file_is_uploaded_once_and_deleted_when_no_checkpoint_needs_it(
    at_url: UrlRun, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    uploaded: dict[str, int] = {}  # object to its bytes
    numbers: set[int] = set()
    original = Location.upload

    def record(self: Location, path: Path) -> None:
        assert uploaded.setdefault(self.url, path.stat().st_size) == path.stat().st_size
        original(self, path)

    def wait_for_commit(step: int, drain: Drain) -> None:
        name = f"{CHECKPOINTS}/{step - 1:08d}/MANIFEST.json"
        while step % 4 == 1 and step > 1 and name not in newest_of(url).files:
            time.sleep(0.01)
        if step > 4:
            numbers.add(newest_state(url).version.number)

    monkeypatch.setattr(Location, "upload", record)
    at_url.train("work", on_step=wait_for_commit)
    at_url.check()
    paths = [name.removeprefix(f"{url}/{OBJECTS}/").partition("/")[2] for name in uploaded]
    of_checkpoints = [path for path in paths if path.startswith(f"{CHECKPOINTS}/")]
    assert len(of_checkpoints) == len(set(of_checkpoints))
    assert len(numbers) >= LAST_STEP // 4 - 1


@pytest.mark.parametrize("seed", range(3))
def test_log_grows_by_its_new_lines_in_few_objects(seed: int, url: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(seed)
    (tmp_path / RUN_FILE).write_text("{}")
    log, total, sent = tmp_path / CHECKPOINT_LOG, 0, 0
    uploader = RunUploader(tmp_path, Location.parse(url), None)
    for number in range(60):
        with log.open("a") as file:
            for _ in range(int(rng.integers(1, 4))):
                file.write(json.dumps({"number": number, "text": "x" * int(rng.integers(40))}))
                file.write("\n")
        uploader.commit()
        objects = newest_of(url).files[CHECKPOINT_LOG]
        joined = b"".join((Location.parse(url) / each.name).read_bytes() for each in objects)
        assert joined == log.read_bytes()
        sent += objects[-1].num_bytes
        total = len(joined)
        sizes = [each.num_bytes for each in objects]
        assert all(a >= 2 * b for a, b in itertools.pairwise(sizes))
    assert sent <= total * (1 + np.log(total / 30) / np.log(1.5))
    check_objects(url)


def test_large_objects_of_a_log_are_not_uploaded_again(url: str, tmp_path: Path) -> None:
    (tmp_path / RUN_FILE).write_text("{}")
    uploader = RunUploader(tmp_path, Location.parse(url), None)
    for _ in range(3):
        with (tmp_path / CHECKPOINT_LOG).open("ab") as file:
            file.write(b"x" * (MERGED_BYTES + 1) + b"\n")
        uploader.commit()
    assert [each.num_bytes for each in newest_of(url).files[CHECKPOINT_LOG]] == [
        MERGED_BYTES + 2
    ] * 3


def test_log_that_was_replaced_is_uploaded_again_from_the_first_difference(
    url: str, tmp_path: Path
) -> None:
    (tmp_path / RUN_FILE).write_text("{}")
    log, uploader = tmp_path / CHECKPOINT_LOG, RunUploader(tmp_path, Location.parse(url), None)
    lines = [b"%03d\n" % number for number in range(40)]
    for end in (30, 38, 40):
        log.write_bytes(b"".join(lines[:end]))
        uploader.commit()
    first, *_ = newest_of(url).files[CHECKPOINT_LOG]
    replace_bytes(log, b"".join([*lines[:32], b"abc\n" * 3]))
    uploader.commit()
    objects = newest_of(url).files[CHECKPOINT_LOG]
    assert objects[0] == first
    joined = b"".join((Location.parse(url) / each.name).read_bytes() for each in objects)
    assert joined == log.read_bytes()


def test_fetched_folder_has_the_files_of_the_state_alone(
    folder: Path, url: str, tmp_path: Path
) -> None:
    earlier = hard_links(folder / "run", tmp_path / "earlier")
    shutil.rmtree(complete_checkpoints(earlier / CHECKPOINTS)[-1])
    (earlier / SUMMARY).unlink()
    upload_state(earlier, url)
    later = hard_links(folder / "run", tmp_path / "later")
    replace_bytes(later / RUN_FILE, (later / RUN_FILE).read_bytes().swapcase())
    fetch_run(Location.parse(url), later, ALL)
    fetch_run(Location.parse(url), tmp_path / "empty", ALL)
    assert contents_of(later) == contents_of(tmp_path / "empty")
    assert compare_runs(later, folder / "run").difference is not None


def test_large_objects_are_fetched_chunk_by_chunk(
    folder: Path, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    upload_state(folder / "run", url)
    for module in ("storage.location", "run.run_manifest"):
        monkeypatch.setattr(f"presage.schemas.{module}.CHUNK_BYTES", 1 << 12)
    fetch_run(Location.parse(url), tmp_path / "copy", ALL)
    fetched = contents_of(tmp_path / "copy")
    assert max(map(len, fetched.values())) > 4 << 12
    for name in newest_of(url).files:
        assert fetched[name] == (folder / "run" / name).read_bytes(), name


def contents_of(run: Path) -> dict[str, bytes]:
    entries = Location.parse(run).entries()
    return {e.path: (run / e.path).read_bytes() for e in entries if e.path != "checkpoints.lock"}


def test_torn_lines_are_not_committed_and_those_of_steps_after_the_checkpoint_are(
    folder: Path, url: str, tmp_path: Path
) -> None:
    run, whole = hard_links(folder / "run", tmp_path / "run"), dict[str, bytes]()
    for name in (METRICS, LEDGER):
        lines = (run / name).read_bytes().splitlines(keepends=True)
        (run / name).unlink()
        whole[name] = b"".join(lines) + lines[-1].replace(b"31", b"32")
        (run / name).write_bytes(whole[name] + b'{"step":33')
    newest = read_newest_state(Location.parse(url))
    uploader = RunUploader(run, Location.parse(url), newest)
    uploader.commit()
    assert (uploader.saved, uploader.logged) == (LAST_STEP + 1, 32)
    fetch_run(Location.parse(url), tmp_path / "copy", ALL)
    assert {name: (tmp_path / "copy" / name).read_bytes() for name in whole} == whole
    check_objects(url)


def test_log_lines_are_committed_between_checkpoints(
    at_url: UrlRun, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upload, "LOG_SEC", 0.0)

    def look(step: int, drain: Drain) -> None:
        if step == 2:
            tail = RunLogTail(Location.parse(url), METRICS)
            steps = list[int]()
            while 2 not in steps:
                steps += [json.loads(line)["step"] for line in tail.read()[0]]
            assert steps == [0, 1, 2]
            assert not any(name.startswith(CHECKPOINTS) for name in newest_of(url).files)
            drain.ask("test")

    with pytest.raises(DrainInterrupt):
        at_url.train("work", on_step=look)


def test_long_runs_commit_their_lines_less_often() -> None:
    assert [upload.log_interval(elapsed) for elapsed in (0, 1000, 4000, 1e6)] == [5, 5, 20, 60]


def test_of_two_writers_one_commits_and_the_other_leaves_nothing(
    at_url: UrlRun, folder: Path, url: str, tmp_path: Path
) -> None:
    run = hard_links(folder / "run", tmp_path / "run")
    first, second = (RunUploader(run, Location.parse(url), None) for _ in range(2))
    first.commit()
    with pytest.raises(SchemaError, match=r"^another process trains this run, and has committed "):
        second.commit()
    assert newest_state(url).version.number == 1
    at_url.check()


def test_objects_that_another_trainer_has_continued_with_are_kept(
    at_url: UrlRun, folder: Path, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reply to a commit is lost; before it is asked for again, another trainer commits."""
    run, create = hard_links(folder / "run", tmp_path / "run"), Location.create

    def reply_after_another(file: Location, data: bytes) -> bool:
        is_created = create(file, data)
        if file.parent.name != MANIFESTS or file.name.startswith("probe-"):
            return is_created
        monkeypatch.setattr(Location, "create", create)
        upload._claim_run(Location.parse(url))
        return file.create(data)

    monkeypatch.setattr(Location, "create", reply_after_another)
    with pytest.raises(SchemaError, match=r"^another process trains this run"):
        RunUploader(run, Location.parse(url), None).commit()
    assert newest_state(url).version.number == 2
    at_url.check()


def test_trainer_that_is_replaced_by_another_ends_in_one_line(at_url: UrlRun, url: str) -> None:
    def replace(step: int, drain: Drain) -> None:
        if step == 9:
            while f"{CHECKPOINTS}/{8:08d}/MANIFEST.json" not in newest_of(url).files:
                time.sleep(0.01)
            with pytest.raises(DrainInterrupt):
                at_url.train("b", resume=True, on_step=stop_at(13))

    with pytest.raises(SchemaError, match=r"^another process trains this run") as error:
        at_url.train("a", on_step=replace)
    assert "\n" not in str(error.value)
    check_objects(url)
    assert f"{CHECKPOINTS}/{14:08d}/MANIFEST.json" in newest_of(url).files
    at_url.train("a", resume=True)
    at_url.check()


def test_work_folder_serves_one_process(at_url: UrlRun) -> None:
    def start_second(step: int, drain: Drain) -> None:
        if step == 2:
            with pytest.raises(SchemaError, match="is used by another process of this machine"):
                at_url.train("work", resume=True)
            drain.ask("test")

    with pytest.raises(DrainInterrupt):
        at_url.train("work", on_step=start_second)


def test_work_folders_of_runs_with_similar_names_are_apart(url: str, tmp_path: Path) -> None:
    outputs = [Location.parse(f"{url}/{name}") for name in ("a.1", "a.2", "b/a.1")]
    with ExitStack() as opened:
        folders = {
            opened.enter_context(work_folder(output, tmp_path, CheckpointConfig(), resume=True))[0]
            for output in outputs
        }
    assert len(folders) == len(outputs)


def test_failed_upload_ends_the_run_and_the_work_folder_continues(
    at_url: UrlRun, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = Location.upload

    def fail(self: Location, path: Path) -> None:
        if f"{CHECKPOINTS}/00000008/" in self.url:
            raise StorageError("store failed: no route; try again", file=self.url)
        original(self, path)

    monkeypatch.setattr(Location, "upload", fail)
    with pytest.raises(StorageError, match=r"^store failed: no route in memory://\S+; try again$"):
        at_url.train("a", on_step=lambda *_: time.sleep(0.02))
    assert f"{CHECKPOINTS}/00000004/MANIFEST.json" in newest_of(url).files
    monkeypatch.undo()
    at_url.train("a", resume=True)
    at_url.check()


# ---- Commands that read and write runs at URLs ----


def run_command(*words: object) -> int:
    return main([str(word) for word in words])


def test_start_at_a_url_with_a_run_is_refused(
    job: Path, dataset: Path, finished_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command("train", job, "--dataset", dataset, "--output", finished_url) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"error: output folder has a run already in {finished_url}; use")


def test_commands_without_a_run_at_the_url_fail_in_one_line(
    job: Path, dataset: Path, url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for words in (
        ("verify", url),
        ("diff", url, url),
        ("export", url, "--output", tmp_path / "model"),
        ("evaluate", job, "--dataset", dataset, "--run", url),
    ):
        assert run_command(*words) == 1
        assert capsys.readouterr().err == f"error: found no run in {url}; train first\n"


def test_evaluate_and_verify_print_what_they_print_of_a_folder(
    folder: Path, job: Path, dataset: Path, finished_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in (
        lambda run: ("evaluate", job, "--dataset", dataset, "--run", run, "--json"),
        lambda run: ("verify", run, "--json"),
    ):
        outputs = []
        for run in (folder / "run", finished_url):
            assert run_command(*command(run)) == 0
            outputs.append(capsys.readouterr())
        assert outputs[0] == outputs[1]


def test_export_publish_and_apply_write_the_same_bytes_at_a_url(
    folder: Path, finished_url: str, tmp_path: Path
) -> None:
    (tmp_path / "out").mkdir()
    run, out = tmp_path / finished_url.rpartition("/")[2], memory_url()
    hard_links(folder / "run", run)
    for source, target in ((run, tmp_path / "out"), (finished_url, out)):
        assert run_command("export", source, "--checkpoint", 28, "--output", f"{target}/old") == 0
        assert run_command("publish", source, "--since", 28, "--output", f"{target}/changes") == 0
        words = ("apply", f"{target}/old", "--changes", f"{target}/changes")
        assert run_command(*words, "--output", f"{target}/new") == 0
    entries = Location.parse(tmp_path / "out").entries()
    names = [entry.path for entry in entries]
    assert [entry.path for entry in Location.parse(out).entries()] == names
    for name in names:
        data = (Location.parse(out) / name).read_bytes()
        assert data == (tmp_path / "out" / name).read_bytes()
    served = load_model(f"{out}/new")
    assert served.file.manifest.lineage.train_step == 32


def test_erased_rows_are_in_no_object(
    folder: Path, url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    upload_state(folder / "run", url)
    with local_run(Location.parse(url), ALL) as run:
        rows = rows_in(newest(run))["pages/rows.npy"]
    ids = tmp_path / "ids"
    ids.write_text(f"{rows[0]}\n")
    words = ("erase", url, "--ids", ids, "--table", "pages", "--work", tmp_path / "work")
    assert run_command(*words) == 0
    check_objects(url)
    assert run_command("erase", f"{url}-2", *words[2:]) == 1
    assert capsys.readouterr().err.startswith(f"error: folder has no run in {url}-2; ")
    with local_run(Location.parse(url), ALL) as run:
        for checkpoint in complete_checkpoints(run / CHECKPOINTS):
            assert rows[0] not in rows_in(verified(checkpoint))["pages/rows.npy"]
        assert np.array_equal(rows_in(newest(run))["pages/rows.npy"], rows[1:])


def newest(run: Path) -> Path:
    checkpoint = newest_checkpoint(run)
    assert checkpoint is not None
    return checkpoint


def verified(checkpoint: Path) -> Path:
    verify_checkpoint(checkpoint)
    return checkpoint


def test_run_at_a_url_starts_from_a_run_at_a_url(tmp_path: Path) -> None:
    job, dataset = make_days(tmp_path)
    run_days(job, dataset, tmp_path, DATES[:2])
    first, second, third = memory_url(), memory_url(), memory_url()
    train_at(first, tmp_path / "work", job, dataset, segments=(DATES[0],))
    start, segments = Location.parse(first), (DATES[1],)
    options: dict[str, Any] = {"start_from": start, "segments": segments}
    with pytest.raises(DrainInterrupt):
        train_at(second, tmp_path / "work", job, dataset, on_step=stop_at(1), **options)
    train_at(second, tmp_path / "elsewhere", job, dataset, resume=True, **options)
    check_equal(second, tmp_path / DATES[1], tmp_path / "copy")
    assert origin_of(tmp_path / "copy") == first
    options = {"start_from": tmp_path / DATES[0], "segments": segments}
    train_at(third, tmp_path / "work", job, dataset, **options)
    with local_run(Location.parse(third), (RUN_FILE,)) as run:
        assert origin_of(run) == str(tmp_path / DATES[0])
    run_job(job, dataset, tmp_path / "run", start_from=start, segments=segments)
    assert compare_runs(tmp_path / "run", tmp_path / "copy").difference is None


def origin_of(run: Path) -> str:
    origin = read_identity(run).origin
    assert origin is not None
    return origin.run


def test_history_and_report_read_the_runs_below_a_url(folder: Path, tmp_path: Path) -> None:
    root = memory_url()
    for name in ("a", "deep/b"):
        upload_state(folder / "run", f"{root}/{name}")
        hard_links(folder / "run", tmp_path / "runs" / name)
    build = b'{"num_samples": 9, "startup_sec": 1.0, "rows_per_sec": 2.0}'
    for directory in (Location.parse(root), Location.parse(tmp_path / "runs")):
        (directory / "deep" / BUILD).write_bytes(build)
    assert len(read_history(Location.parse(root)).builds) == 1
    assert read_history(Location.parse(root)) == read_history(tmp_path / "runs")
    found, expected = (
        read_runs(each)["runs"] for each in (Location.parse(f"{root}/a"), tmp_path / "runs" / "a")
    )
    assert found == expected
    found, expected = (
        read_runs(each)["runs"] for each in (Location.parse(root), tmp_path / "runs")
    )
    assert [run.name for run in found] == [run.name for run in expected] == ["a"]
    (Location.parse(root) / "deep" / BUILD).write_bytes(b"[")
    with pytest.raises(SchemaError, match=f" in {root}/deep/{BUILD}"):
        read_history(Location.parse(root))
    with pytest.raises(SchemaError, match="directory of runs is empty in memory://"):
        read_runs(Location.parse(memory_url()))


# ---- Reading while a trainer commits ----


def test_reader_whose_objects_are_deleted_meanwhile_reads_the_newer_state(
    folder: Path, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    upload_state(folder / "run", url)
    run = hard_links(folder / "run", tmp_path / "run")
    original, old = Location.chunks, newest_state(url)

    def replace_meanwhile(self: Location, num_bytes: int) -> Any:
        monkeypatch.undo()
        (Location.parse(url) / OBJECTS).remove_all()
        nothing = replace(old, manifest=RunManifest(writer="a", files={}))
        RunUploader(run, Location.parse(url), nothing).commit()
        return original(self, num_bytes)

    monkeypatch.setattr(Location, "chunks", replace_meanwhile)
    fetched = fetch_run(Location.parse(url), tmp_path / "copy", ALL)
    assert fetched.version.number == old.version.number + 1
    assert compare_runs(tmp_path / "copy", folder / "run").difference is None


def test_missing_and_changed_objects_are_named(
    folder: Path, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    upload_state(folder / "run", url)
    output, newest = Location.parse(url), newest_of(url)
    name = newest.files[METRICS][0].name
    data = (output / name).read_bytes()
    (output / name).write_bytes(data[:-1] + b" ")
    assert run_command("verify", url) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: object must have sha256 ")
    assert error.count("\n") == 1
    assert name in error
    output.remove([name])
    assert run_command("verify", url) == 1
    assert "object of the run is missing: " in capsys.readouterr().err


def test_manifest_that_leads_out_of_the_run_is_refused(url: str, tmp_path: Path) -> None:
    for files in (
        {"../a": ()},
        {"a": (RunObject(name="../b", num_bytes=1, sha256="c"),)},
        {"a": (RunObject(name="/b", num_bytes=1, sha256="c"),)},
    ):
        manifest = RunManifest(writer="a", files=files)
        Versions(Location.parse(url)).path(1).write_bytes(encode_manifest(manifest))
        with pytest.raises(SchemaError, match="path leads out of the run"):
            fetch_run(Location.parse(url), tmp_path / "copy", ALL)
