"""A watched scheduler, and the commands that read its log."""

from io import StringIO
from pathlib import Path
from urllib.request import urlopen

import pytest
from rich.console import Console

from presage.scheduler.__main__ import main
from presage.scheduler.controller.log import LOG
from presage.scheduler.status import terminal
from presage.scheduler.status.terminal import ADDRESS, OFF, port_of, watching
from presage.schemas.storage.locks import directory_lock
from tests.scheduler.status.recordings import record_jobs
from tests.shared import json_of, output_of, refusal_of


def test_watching_serves_a_page_whose_address_lies_in_the_folder_meanwhile(tmp_path: Path) -> None:
    output, messages = tmp_path / "new" / "folder", list[str]()
    with watching(output, 0, Console(file=StringIO()), messages.append) as show:
        address = (output / ADDRESS).read_text().strip()
        assert messages == [f"status page: {address}"]
        with urlopen(address) as answer:
            assert b"no job yet" in answer.read()
        record_jobs(3).write_log(output / LOG, 60)
        with urlopen(f"{address}metrics") as answer:
            assert b"presage_events_total 60.0" in answer.read()
        show("a decision")
    assert messages[1:] == ["a decision"]
    assert not (output / ADDRESS).exists()


def test_watching_leaves_the_address_of_a_scheduler_that_holds_the_folder(tmp_path: Path) -> None:
    (tmp_path / ADDRESS).write_text("of another\n")
    console = Console(file=StringIO())
    with directory_lock(tmp_path, "", ""), watching(tmp_path, 0, console, print):
        pass
    assert (tmp_path / ADDRESS).read_text() == "of another\n"


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal is waited for, however busy the machine is."""
    monkeypatch.setattr(terminal, "CLOSE_SEC", 600.0)


@pytest.mark.usefixtures("patient")
def test_watching_a_terminal_shows_lines_and_the_view_without_escapes_of_others(
    tmp_path: Path,
) -> None:
    record_jobs(3).write_log(tmp_path / LOG, 60)
    target = StringIO()
    console = Console(file=target, force_terminal=True, width=200, height=60)
    with watching(tmp_path, OFF, console, print) as show:
        show("a line \x1b]0;title\x07 of a child")
    assert r"a line \x1b]0;title\x07 of a child" in target.getvalue()
    assert "of 8 cores" in target.getvalue()
    assert "first" in target.getvalue()
    assert not (tmp_path / ADDRESS).exists()


@pytest.mark.usefixtures("patient")
def test_watching_a_terminal_outlives_a_damaged_log(tmp_path: Path) -> None:
    (tmp_path / LOG).write_text("{\n")
    target = StringIO()
    console = Console(file=target, force_terminal=True, width=200)
    with watching(tmp_path, OFF, console, print) as show:
        show("a line")
    assert "a line" in target.getvalue()
    assert "no status: line is no snapshot" in target.getvalue()


@pytest.mark.slow
def test_main_status_prints_what_a_scheduler_did(tmp_path: Path) -> None:
    record_jobs(3).write_log(tmp_path / LOG)
    out = output_of(main, ["status", str(tmp_path)])
    for word in ("3 jobs: 3 finished", "failures and replacements", "finish: 2,048 samples"):
        assert word in out
    body = json_of(main, ["status", str(tmp_path), "--json"])
    assert [job["phase"] for job in body["jobs"]] == ["finished"] * 3


def test_main_status_without_a_log_says_so(tmp_path: Path) -> None:
    message = f"folder has no scheduler log {LOG} in {tmp_path}; "
    assert refusal_of(main, ["status", str(tmp_path)]).startswith(message)


@pytest.mark.parametrize("text", ["70000", "-1", "page"])
def test_main_run_refuses_what_is_no_port(
    tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["run", str(tmp_path / "job.yaml"), f"--status={text}"])
    assert "--status" in capsys.readouterr().err
    assert port_of("off") == OFF
