"""When both pools are held: segments that are built while those before them are trained.

Letters: K segments, j segment jobs at once, t seconds of each, u seconds to train one
segment once.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from scheduler.model import Floats


@dataclass(frozen=True, slots=True)
class Timeline:
    """When both pools are held, in seconds from the start; arrays broadcast together.

    Attributes:
        built_sec: the last segment is committed; the preprocessing pool goes.
        first_sec: the first segment is committed; the training pool comes.
        end_sec: the last step is committed.
        waiting_sec: time that the training pool had no segment to train.
    """

    built_sec: Floats
    first_sec: Floats
    end_sec: Floats
    waiting_sec: Floats


def timeline(
    segment: Floats,
    num_segments: int,
    segment_jobs: ArrayLike,
    train_segment_sec: ArrayLike,
    epochs: int,
) -> Timeline:
    """Follow K equal segments through both pools.

    Segments come in waves of j; the first epoch trains each as it is committed:
    with W = ceil(K / j), training ends its first epoch at the later of
    t + K u (it never waits again after the first wave) and
    W t + (K - (W - 1) j) u (it waits for the last wave).

    Args:
        segment: (...) t, seconds of one segment job.
        num_segments: K.
        segment_jobs: (...) j, at least 1.
        train_segment_sec: (...) u.
        epochs: passes over the data; all but the first find everything built.
    """
    jobs = np.asarray(segment_jobs, float)
    waves = np.ceil(num_segments / jobs)
    built = waves * segment
    unit = np.asarray(train_segment_sec, float)
    work = num_segments * unit
    last_wave = (num_segments - (waves - 1.0) * jobs) * unit
    followed = np.maximum(segment + work, built + last_wave)
    return Timeline(
        built, segment, followed + (epochs - 1) * work, np.maximum(followed - segment - work, 0.0)
    )
