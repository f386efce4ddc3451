"""The page in a browser: it is rendered, and updated in place."""

import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from presage.scheduler.controller.log import LOG
from presage.scheduler.status.board import Board, answer, serving
from tests.scheduler.status.recordings import record_jobs
from tests.scheduler.status.stored import Stored

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
needs_chromium = pytest.mark.skipif(
    CHROMIUM is None, reason="needs Chromium to look at the page, and there is none on PATH"
)
PROBE = """
const table = document.getElementById("decision-table"), first = document.querySelector("details");
const heading = document.getElementById("budget-title");
table.focus({ preventScroll: true });
table.scrollTop = 40;
first.open = true;
setTimeout(() => {
  const same = document.getElementById("budget-title") === heading;
  const kept = [document.activeElement.id, table.scrollTop, first.open, first.isConnected, same];
  document.body.setAttribute("data-kept", kept.join(" "));
}, 9000);
"""

CELLS = """
setTimeout(() => {
  const cells = [...document.querySelectorAll(".ranges li")], page = document.documentElement;
  const rows = new Set(cells.map((cell) => cell.offsetTop)).size;
  const whole = cells.every((cell) => cell.scrollWidth <= cell.clientWidth);
  const fits = page.scrollWidth <= page.clientWidth;
  const values = [cells.length, rows, whole, fits, cells[RANGE].textContent];
  document.body.setAttribute("data-cells", values.join(" "));
}, 9000);
"""


def output_of_chromium(address: str, profile: Path, *options: str) -> str:
    """Return what headless Chromium prints of a page that it has had for 12 s of its own time."""
    assert CHROMIUM is not None
    done = subprocess.run(
        [
            *(CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu"),
            *(f"--user-data-dir={profile}", "--virtual-time-budget=12000", *options, address),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@contextmanager
def probed(log: Path, content: bytes, part: int, probe: str = PROBE) -> Iterator[str]:
    """Serve the page with a script that uses it, about a log that grows each time it is read."""
    board = Board(log)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path == "/":
                log.write_bytes(content[: len(log.read_bytes()) + part])
            status, kind, body = answer(self.path, board, 0.0)
            if self.path == "/":
                body = body.replace(b"</body>", b'<script src="probe.js"></script></body>')
            if self.path == "/probe.js":
                status, kind, body = 200, "text/javascript", probe.encode()
            self.send_response(int(status))
            self.send_header("Content-Type", kind)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/"
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.slow
@needs_chromium
def test_page_is_brought_up_to_date_with_focus_position_and_open_parts_kept(tmp_path: Path) -> None:
    record_jobs(3).write_log(tmp_path / "whole")
    content = (tmp_path / "whole").read_bytes()
    log = tmp_path / LOG
    begin = len(content) // 2
    log.write_bytes(content[:begin])
    with probed(log, content, len(content) // 20) as address:
        shown = output_of_chromium(address, tmp_path / "profile", "--dump-dom")
    assert 'data-kept="decision-table 40 true true true"' in shown
    assert "Updates automatically." in shown
    counts = re.findall(r"UTC, (\d+) events", shown)
    (tmp_path / "first").write_bytes(content[: begin + len(content) // 20])
    assert int(counts[0]) > Board(tmp_path / "first").view().num_events


@pytest.mark.slow
@needs_chromium
def test_page_as_it_is_served_is_drawn_and_runs_its_script(tmp_path: Path) -> None:
    record_jobs(3).write_log(tmp_path / LOG, 120)
    with serving(Board(tmp_path / LOG), 0) as address:
        shown = output_of_chromium(address, tmp_path / "profile", "--dump-dom")
        picture = tmp_path / "page.png"
        output_of_chromium(
            address, tmp_path / "other", f"--screenshot={picture}", "--window-size=320,2000"
        )
    assert "Updates automatically." in shown, "its policy lets its own script run"
    assert re.search(r'<button[^>]*id="pause"[^>]*>', shown)
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
@needs_chromium
@pytest.mark.parametrize(("width", "num_rows"), [(1280, 1), (500, 2)], ids=["wide", "narrow"])
def test_cells_of_stores_fit_the_window_and_follow_a_move_to_its_end(
    tmp_path: Path, width: int, num_rows: int
) -> None:
    stored = Stored(1, 300)
    slots, source, target = stored.begins_to_move()
    log, whole = tmp_path / LOG, tmp_path / "whole"
    stored.write_log(log)
    stored.moves()
    stored.write_log(whole)
    begun, content = log.read_bytes(), whole.read_bytes()
    assert content.startswith(begun)
    with probed(log, content, 0, CELLS.replace("RANGE", str(slots))) as address:
        first = output_of_chromium(
            address, tmp_path / "first", "--dump-dom", f"--window-size={width},900"
        )
    fits = f"16 {num_rows} true true"
    moving = f"range {slots}: moving from {source} to {target}"
    assert f'data-cells="{fits} {moving}"' in first
    with probed(log, content, len(content), CELLS.replace("RANGE", str(slots))) as address:
        log.write_bytes(begun)
        later = output_of_chromium(
            address, tmp_path / "later", "--dump-dom", f"--window-size={width},900"
        )
    assert f'data-cells="{fits} range {slots}: store {target}"' in later


def luminance(colour: str) -> float:
    """Return the relative luminance of `#rgb` or `#rrggbb` (WCAG 2.2)."""
    digits = colour.removeprefix("#")
    digits = "".join(2 * c for c in digits) if len(digits) == 3 else digits
    parts = [int(digits[i : i + 2], 16) / 255 for i in (0, 2, 4)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(first: str, second: str) -> float:
    light, dark = sorted((luminance(first), luminance(second)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("mode", [0, 1], ids=["light", "dark"])
def test_colours_stand_out_from_the_paper(repository: Path, mode: int) -> None:
    style = (repository / "scheduler/status/status.css").read_text()
    block = re.findall(r":root \{(.*?)\}", style, re.DOTALL)[mode]
    colours = dict(re.findall(r"--(\w+): (#\w+);", block))
    for name in ("ink", "soft", "ours", "warn", "bad"):
        assert contrast(colours[name], colours["paper"]) >= 4.5, name
    for name in ("ink", "soft"):
        for paper in ("rail", "wash"):
            assert contrast(colours[name], colours[paper]) >= 4.5, (name, paper)
    for name in ("other", "focus"):
        assert contrast(colours[name], colours["paper"]) >= 3.0, name
