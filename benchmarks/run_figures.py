"""What the steps of a training run took."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from schemas.run_log import StepMetric


def figures_of(timed: Sequence[StepMetric]) -> dict[str, float]:
    """Return the milliseconds of a step and of its phases, and the loss of the last step.

    Args:
        timed: steps that count, those in which caches fill left out.
    """
    steps = [m.num_samples / m.samples_per_sec * 1e3 for m in timed]
    return {
        "step_ms": round(statistics.median(steps), 2),
        "mean_ms": round(statistics.mean(steps), 2),
        "loss_last": timed[-1].loss,
        **{
            phase: round(statistics.median(m.phases[phase] for m in timed) * 1e3, 2)
            for phase in timed[0].phases
        },
    }
