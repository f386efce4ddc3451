"""The files of the packages that one row, one batch and one decision of the demo enter.

    python -m tests.traces

Calls are traced in one process and in its steady state: of a row from the reading of a file, not
the first, to the stored parts; of a batch during steps that read new row groups; of a decision
while the driver polls, after the start of the trainer: two more segments are built then, one after
the other.
What is called before (set-up), errors, and files of `APART` (configuration, bindings of compiled
code) do not count.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from tests.integration.small_demo import write_small_demo

REPOSITORY = Path(__file__).resolve().parents[1]
SMALL = {
    "num_samples: 200000": "num_samples: 800000",
    "oracle: {batch_samples: 4096}": "oracle: {batch_samples: 1024}",
    "\n  batch_samples: 4096": "\n  batch_samples: 1024",
}
PACKAGES = ("pipelines", "presage", "scheduler", "schemas", "trainer")
APART = ("schemas/config/", "schemas/kernels/", "trainer/embedding/kernels/", "schemas/errors.py")


@dataclass
class Trace:
    """Files entered while a function is running, in all threads.

    Attributes:
        file, function: the qualified name of the function.
        counts: whether a call counts, by its frame.
        files: path -> the functions that were called.
    """

    file: str
    function: str
    counts: Callable[[FrameType], bool]
    files: dict[str, set[str]] = field(default_factory=dict)
    _frame: FrameType | None = None

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        """Note a call, as the profile function of a thread."""
        if event not in ("call", "return") or not frame.f_code.co_filename.startswith(ROOT):
            return
        if event == "return":
            if frame is self._frame:
                self._frame = None
            return
        path, name = frame.f_code.co_filename.removeprefix(ROOT), frame.f_code.co_qualname
        if self._frame is None and (path, name) == (self.file, self.function):
            self._frame = frame if self.counts(frame) else None
        if self._frame is not None and path.startswith(PACKAGES):
            self.files.setdefault(path, set()).add(name)

    @contextmanager
    def tracing(self) -> Iterator[None]:
        """Note calls in the threads that start meanwhile, and in this one."""
        threading.setprofile(self)
        sys.setprofile(self)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)


ROOT = f"{REPOSITORY}/"


def trace_row(job: Path, log: Path, dataset: Path) -> Trace:
    """Build the demo in this process."""
    from presage.pipelines.cli import main

    seen = set[str]()

    def counts(frame: FrameType) -> bool:
        name = frame.f_locals["function"].__name__
        is_first = name not in seen
        seen.add(name)
        return name == "write_part" or (name == "map_rows" and not is_first)

    trace = Trace("pipelines/exchange.py", "_run_task", counts)
    with trace.tracing():
        main(["build", str(job), f"--input={log}", f"--output={dataset}", "--runner=InProcess"])
    return trace


def trace_batch(job: Path, dataset: Path, output: Path) -> Trace:
    """Train the demo in this process, with the planned cache."""
    from presage.trainer.__main__ import main

    def counts(frame: FrameType) -> bool:
        return 10 <= frame.f_locals["self"].step < 40

    trace = Trace("trainer/loop.py", "TrainingLoop._train_step", counts)
    arguments = ["--dataset", str(dataset), "--output", str(output), "--embedding", "cached"]
    with trace.tracing():
        main(["train", str(job), *arguments, "--steps", "41"])
    return trace


def trace_decision(folder: Path) -> Trace:
    """Schedule a small demo of four segments, which are built while the first ones are trained."""
    from presage.scheduler.__main__ import main

    job = folder / "small" / "job.yaml"
    job.parent.mkdir()
    text = write_small_demo(REPOSITORY, job.parent, SMALL)
    job.write_text(text.rstrip() + "\nschedule: {training: {max_replicas: 2}}\n")
    trace = Trace("scheduler/drivers/driver.py", "Driver.poll", _has_trainer)
    with trace.tracing():
        main(["run", str(job), "--output", str(folder / "scheduled"), "--status", "off"])
    return trace


def _has_trainer(frame: FrameType) -> bool:
    return any(job.trainers for job in frame.f_locals["self"].state.jobs.values())


def traces(folder: Path) -> dict[str, Trace]:
    """Return the traces of one sample, one batch and one decision of the demo."""
    from presage.pipelines.cli import main as pipelines

    job = shutil.copytree(REPOSITORY / "schemas" / "demo", folder / "job") / "job.yaml"
    with redirect_stdout(sys.stderr):
        pipelines(["generate", str(job), "--output", str(folder / "log")])
        return {
            "One sample": trace_row(job, folder / "log", folder / "dataset"),
            "One batch": trace_batch(job, folder / "dataset", folder / "run"),
            "One decision": trace_decision(folder),
        }


def main() -> None:
    """Print the files of each trace."""
    with tempfile.TemporaryDirectory() as name:
        found = traces(Path(name))
    for title, trace in found.items():
        apart = [path for path in trace.files if path.startswith(APART)]
        files = [path for path in trace.files if path not in apart]
        lines = [f"{title}: {len(files)} files, {len(apart)} apart"]
        lines += [f"  {path}: {', '.join(sorted(trace.files[path]))}" for path in files]
        print(*lines, f"  apart: {', '.join(apart)}", sep="\n")  # noqa: T201


if __name__ == "__main__":
    main()
