"""Who commits a run of replicas at a URL: one after the other, and none of an old attempt."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from presage.schemas.run.records import METRICS, SUMMARY
from presage.schemas.storage.location import Location
from presage.trainer.run.output import ROWS_LOST, RunOutput
from presage.trainer.run.upload import RunUploader, SupersededError, begin_attempt
from presage.trainer.stores.store import RowsLostError
from tests.shared import hard_links
from tests.trainer.runs import plain_run
from tests.trainer.url_runs import check_objects, memory_url, newest_of


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A folder with a finished run."""
    return hard_links(plain_run(), tmp_path / "run")


@pytest.fixture
def url() -> Location:
    return Location.parse(memory_url())


@pytest.fixture
def replica(run: Path, url: Location, tmp_path: Path) -> Callable[[str], RunOutput]:
    """Return a function that makes the output of a replica of the newest attempt."""
    launcher = RunUploader(run, url, None)
    launcher.commit()

    def make(name: str) -> RunOutput:
        (tmp_path / name).mkdir()
        return RunOutput(tmp_path / name, url, newest_of(str(url)).attempt)

    return make


def test_next_writer_continues_from_the_state_of_the_former_one(
    replica: Callable[[str], RunOutput], run: Path, url: Location
) -> None:
    with replica("a") as first, replica("b") as second:
        assert first.saved == first.logged(0) == -1, "nothing is known to be durable"
        first.begin(lambda: None)
        for output, text in ((first, "{}"), (second, "[]")):
            if output is second:
                second.begin(lambda: None)
                assert (second.folder / SUMMARY).read_text() == "{}"
            (output.folder / SUMMARY).write_text(text)
            assert output.commit()
        (first.folder / SUMMARY).write_text("{ }")
        assert not first.commit(), "the second one has committed since"
        assert first.must_begin
        assert not second.must_begin
        first.begin(lambda: None)
        assert (first.folder / SUMMARY).read_text() == "[]"
        assert first.commit()
        steps = len((run / METRICS).read_text().splitlines())
        assert (first.saved, first.logged(-1)) == (steps, steps - 1)
    assert newest_of(str(url)).files.keys() >= {METRICS, SUMMARY}
    check_objects(str(url))


def test_replicas_of_an_earlier_attempt_commit_nothing(
    replica: Callable[[str], RunOutput], url: Location, tmp_path: Path
) -> None:
    with replica("a") as former, replica("b") as other:
        former.begin(lambda: None)
        assert former.commit()
        begin_attempt(url, tmp_path / "launcher")
        newest = newest_of(str(url))
        (former.folder / SUMMARY).write_text("{}")
        assert not former.commit()
        for output in (former, other):
            assert output.must_begin
            with pytest.raises(SupersededError):
                output.begin(lambda: None)
    assert newest_of(str(url)) == newest
    check_objects(str(url))


def test_replica_reads_that_rows_of_its_attempt_are_lost(
    replica: Callable[[str], RunOutput], url: Location
) -> None:
    outputs = replica("a"), replica("b")
    (url / ROWS_LOST).write_bytes(b"another")
    outputs[0].check_attempt()
    (url / ROWS_LOST).write_bytes(outputs[0].attempt.encode())
    with pytest.raises(RowsLostError):
        outputs[1].check_attempt()
