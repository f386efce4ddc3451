"""The page is well formed, accessible, and escapes hostile names."""

from io import StringIO

import pytest
from rich.console import Console

from presage.scheduler.controller.events import Ended
from presage.scheduler.controller.handle import handle
from presage.scheduler.controller.journal import Incident, Journal, record
from presage.scheduler.controller.log import to_decision
from presage.scheduler.controller.state import State
from presage.scheduler.status.status_page import KIND_LABELS, MARKS, page
from presage.scheduler.status.terminal import render
from presage.scheduler.status.view import View, view_of
from tests.scheduler.status.document import check_usable, parsed
from tests.scheduler.status.recordings import Recording, record_job_named, record_jobs

HOSTILE = {
    "a script": "<script>alert(1)</script>",
    "an attribute": "\" onload='alert(1)' x=\"",
    "lines and escapes": "first\nsecond\r\x1b[2J\x1b]0;title\x07",
    "another direction": "safe\u202egnp.exe",
    "a template": "$title ${main} {job}",
    "very long": "name" * 500,
}


@pytest.mark.parametrize("most", [0, 1, 4, 40, 120, None])
def test_page_at_any_moment_is_a_document_that_can_be_used_without_sight(most: int | None) -> None:
    check_usable(parsed(record_jobs(3).view(most)))


def test_page_names_nothing_from_elsewhere_and_has_no_inline_code() -> None:
    document = parsed(record_jobs(3).view(80))
    for tag, attributes in document.elements:
        assert "style" not in attributes
        assert tag != "style"
        assert not [name for name in attributes if name.startswith("on")]
        for name in ("src", "href"):
            value = attributes.get(name) or ""
            assert "//" not in value
    assert [script["src"] for script in document.all("script")] == ["status.js"]


def with_detail(recordings: Recording, most: int, detail: str) -> View:
    """Return the view after so many events, and after a process has said something and died."""
    state = recordings.state(most)
    job, process = next((j, p) for j in state.jobs.values() for p in j.processes)
    event = Ended(
        time_sec=state.now_sec, job=job.name, process=process, outcome="failed", detail=detail
    )
    after, actions = handle(state, event)
    decisions = [to_decision(action, after.now_sec) for action in actions]
    assert detail in decisions[0].reason
    return view_of(after, record(recordings.journals[most], state, event, after, decisions))


@pytest.mark.parametrize("name", HOSTILE)
def test_page_and_terminal_show_a_hostile_name_as_text(name: str) -> None:
    recordings = record_job_named("calm"), record_job_named(HOSTILE[name])
    plain, with_name = (with_detail(one, 40, HOSTILE[name]) for one in recordings)
    document, plain = parsed(with_name), parsed(plain)
    assert [tag for tag, _ in document.elements] == [tag for tag, _ in plain.elements]
    shown = "".join(document.text)
    for code in (*range(32), 0x7F, 0x202E):
        if chr(code) not in "\n":
            assert chr(code) not in shown
    target = StringIO()
    Console(file=target, width=200, force_terminal=True).print(render(with_name, 9, 9))
    bold = target.getvalue().replace("\x1b[1m", "").replace("\x1b[0m", "")
    assert "\x1b" not in bold
    assert "\u202e" not in bold


def test_page_shows_each_kind_of_incident_by_a_shape_of_its_own() -> None:
    assert len(set(MARKS.values())) == len(MARKS) == len(KIND_LABELS)
    incidents = tuple(
        Incident(time_sec=i, job="none", process=f"coordinator-0.{i}", kind=kind, detail="why")
        for i, kind in enumerate(MARKS)
    )
    text = page(view_of(State(now_sec=9.0), Journal(num_events=1, incidents=incidents)))
    for kind in MARKS:
        assert f'class="mark {kind}"' in text
        assert KIND_LABELS[kind] in text
