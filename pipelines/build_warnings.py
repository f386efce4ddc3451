"""What a build says about a dataset that is sound, and yet hardly what its user wants."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from pipelines.groups.costs import LEAST_DEDUP_FACTOR
from pipelines.statistics.stored import segment_statistics
from schemas.dataset import Dataset, Segment
from schemas.job_split import SplitConfig
from schemas.layout import EVALUATION, TRAIN, buffers_path, samples_path


def warnings_of(dataset: Dataset, segment_id: str, split: SplitConfig) -> Iterator[str]:
    """Yield a line for each thing to correct in the job.

    A split may be empty in one of several segments, such as one of a day before `evaluation_from`.
    So it is looked for in all, but where each segment holds back a part of its own day.

    Args:
        dataset: opened after the build.
        segment_id: of the segment that was built.
        split: of its job.
    """
    (built,) = (s for s in dataset.segments if s.manifest.id == segment_id)
    looked_at = (built,) if split.evaluation_last is not None else dataset.segments
    splits = {name for segment in looked_at for name in segment.manifest.splits}
    if split.evaluation_from is not None:
        time = dataset.job.data.session.time
        by_day = split.evaluation_last is not None
        earlier, later = ("a longer", "a shorter") if by_day else ("an earlier", "a later")
        if EVALUATION not in splits:
            yield (
                f"no sample is for evaluation: {_range(looked_at, time)}{_key(split)}; "
                f"set it to {earlier} time, or to null to train on all samples"
            )
        if TRAIN not in splits:
            yield (
                f"no sample is for training: {_range(looked_at, time)}{_key(split)}; "
                f"set it to {later} time, or append segments that are before it"
            )
    labels = dataset.features.with_role("label")
    statistics = segment_statistics(built).datasets[0].features if len(labels) == 1 else ()
    numbers = (f.num_stats for f in statistics if f.path.step[0] == labels[0])
    yield from label_warnings(labels, next(((n.min, n.max) for n in numbers), None))
    factors = {name: group.dedup_factor for name, group in built.manifest.groups.items()}
    yield from group_warnings(factors, dataset.job.data.groups, built.directory)


def group_warnings(
    factors: Mapping[str, float], groups: Mapping[str, Sequence[str]], segment: Path
) -> Iterator[str]:
    """Yield a line for each group that saves nothing.

    Lists that are windows over buffers save what they have in common, without equal tuples.

    Args:
        factors: group to dedup factor.
        groups: columns of each.
        segment: directory of the segment that holds them.
    """
    for name, factor in factors.items():
        if factor >= LEAST_DEDUP_FACTOR:
            continue
        if not any((segment / buffers_path(c, 0)).parent.is_dir() for c in groups[name]):
            yield (
                f"group {name!r} hardly repeats: its dedup factor is {factor:.3g}, so "
                "it saves nothing and costs its inverse indices; remove it from data.groups, its "
                "columns are stored with the samples then"
            )


def label_warnings(labels: Sequence[str], extremes: tuple[Any, Any] | None) -> Iterator[str]:
    """Yield a line where a model cannot learn from the label.

    Args:
        labels: names of the features that the schema tags so.
        extremes: least and greatest value of the only one, None where it has none.
    """
    if len(labels) != 1:
        yield (
            f"schema.pbtxt tags {len(labels)} features as label: a model can be trained on "
            "samples with one label only"
        )
    elif extremes is not None and extremes[0] == extremes[1]:
        yield (
            f"label {labels[0]!r} is {extremes[0]:g} in every sample: a model cannot learn from "
            "it; correct data.samples"
        )


def _key(split: SplitConfig) -> str:
    if split.evaluation_last is not None:
        return f"data.split.evaluation_last={split.evaluation_last} begins at {_at(split)}"
    return f"data.split.evaluation_from is {_at(split)}"


def _at(split: SplitConfig) -> str:
    return str(split.evaluation_from)


def _range(segments: tuple[Segment, ...], time: str) -> str:
    """Return between which times samples lie; they are read for this alone."""
    ranges = [pc.min_max(column).as_py() for s in segments for column in _times(s, time)]
    if not ranges:
        return ""  # the time is in a group, or the SQL alone has it
    first, last = min(f["min"] for f in ranges), max(f["max"] for f in ranges)
    return f"samples are of {first} to {last}, "


def _times(segment: Segment, time: str) -> Iterator[pa.ChunkedArray]:
    count = 0
    while (path := samples_path(count)) in segment.files:
        file, count = segment.file(path), count + 1
        if time in file.schema.names:
            yield file.read([time])[time]
