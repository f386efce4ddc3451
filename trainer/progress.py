"""Progress on stderr, only where a person looks at it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from schemas.events import StepMetric


@contextmanager
def show_progress() -> Iterator[Callable[[StepMetric, int], None]]:
    """Yield what is to be called after each step, with its metric and the number of steps."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(
        *columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal
    ) as progress:
        task = progress.add_task("train", total=None)

        def on_step(metric: StepMetric, num_steps: int) -> None:
            text = f"train loss={metric.loss:.4f} samples/s={metric.samples_per_sec:.0f}"
            progress.update(task, total=num_steps, completed=metric.step + 1, description=text)

        yield on_step
