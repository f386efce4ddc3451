"""Run Flink on this machine: `python deploy/flink embedded|session [-- COMMAND ...]`.

Without a command it prints one JSON object with the Beam options to use, and serves until it is
interrupted. With one it adds the options to the command, runs it, and ends with its exit code.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from artifacts import fetch, missing_tools
from cluster import Running, running


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all arguments."""
    usage = "python deploy/flink [-h] [OPTION ...] KIND [-- COMMAND ...]"
    parser = argparse.ArgumentParser(usage=usage, description=__doc__)
    parser.add_argument("kind", choices=["fetch", "embedded", "session"], metavar="KIND")
    parser.add_argument("--slots", type=int, default=2, metavar="N", help="tasks at once")
    parser.add_argument("--task-managers", type=int, default=1, metavar="N", help="of a session")
    parser.add_argument("--logs", type=Path, metavar="DIR", help="keep the logs in this directory")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Start a Flink, use it, end it."""
    words = list(sys.argv[1:] if argv is None else argv)
    own = words.index("--") if "--" in words else len(words)
    arguments, command = build_parser().parse_args(words[:own]), words[own + 1 :]
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _leave)
    started = time.monotonic()
    try:
        if missing := missing_tools():
            raise RuntimeError(f"PATH must have java, javac and mvn, got no {', '.join(missing)}")
        flink_jar = fetch(lambda text: print(text, file=sys.stderr, flush=True))
        if arguments.kind == "fetch":
            print(flink_jar)
            return 0
        with tempfile.TemporaryDirectory(prefix="presage-flink-") as temporary:
            directory = arguments.logs or Path(temporary)
            directory.mkdir(parents=True, exist_ok=True)
            managers = arguments.task_managers
            with running(
                arguments.kind, flink_jar, directory.resolve(), arguments.slots, managers
            ) as flink:
                about = _describe(flink, time.monotonic() - started)
                if command:
                    print(about, file=sys.stderr, flush=True)
                    return subprocess.run([*command, *flink.options]).returncode
                print(about, flush=True)
                return _serve(flink)
    except RuntimeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _describe(flink: Running, startup_sec: float) -> str:
    return json.dumps(
        {
            "options": flink.options,
            "rest": flink.rest,
            "pids": {name: process.pid for name, process in flink.processes.items()},
            "startup_sec": round(startup_sec, 3),
        }
    )


def _serve(flink: Running) -> int:
    while not (dead := flink.dead()):
        time.sleep(0.5)
    raise RuntimeError(f"Flink must go on until it is told to end, got the end of {dead}")


def _leave(number: int, _: FrameType | None) -> None:
    sys.exit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
