"""Which jobs may append to a dataset, and which segments it accepts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pipelines.context import BuildRequest
from pipelines.quality.gate import check_limits
from pipelines.quality.gate_files import parse_schema, pass_gate
from pipelines.table.days import (
    check_label,
    check_replaceable,
    refuse_other_files,
    refuse_sealed,
    refuse_without_day,
    same_files,
    segment_of_day,
)
from pipelines.table.publish import CommitRequest, find_segment, free_position, read_root
from pipelines.transforms.fit import check_fitted_files, fitted_files_match
from schemas.config.job import DataConfig, Job
from schemas.dataset import Dataset, column_types, open_dataset
from schemas.errors import SchemaError, suggest_name_or
from schemas.features import Feature, FeatureSet
from schemas.layout import MANIFEST, SEGMENTS
from schemas.manifest import DatasetManifest, InputFile, Reference, SegmentManifest, read_segment

# What the first segment pins, and which jobs may append to it.
#
# Readers use one job and one schema for all segments. So whatever decides how bytes are laid out
# or what they mean stays as it is: a job that says otherwise is refused by the key. What only
# decides which rows come in may change from day to day, and columns may be added, when older
# segments have an answer.

PER_SEGMENT_KEYS = frozenset(
    {"sources", "sides", "samples", "split", "on_error", "generate", "schema", "gate"}
)
"""Keys of `data` that each segment may have its own of; every other one is pinned."""

_DECLARE_AGAIN = "declare it and let the job's SQL yield it, NULL where there is none"

NOT_IN_ID = frozenset({"gate", "generate"})
"""Keys of `data` that change no byte of samples: whatever they are, it is the same segment."""


def identity_of(data: DataConfig) -> dict[str, Any]:
    """Return the part of the data section that decides what a segment holds."""
    identity = {key: value for key, value in asdict(data).items() if key not in NOT_IN_ID}
    if data.split.evaluation_last is None:
        # Ids are what they were before these keys existed.
        del identity["split"]["evaluation_last"]
    del identity["samples"]["limits"]
    for inputs in (identity["sources"], identity["sides"]):
        for config in inputs.values():
            if not config["partitions"]:
                del config["partitions"]
    return identity


def check_compatible(dataset: Dataset, job: Job, features: FeatureSet, path: Path) -> None:
    """Refuse a job whose segment could not be read together with those that are there.

    Args:
        dataset: an open dataset; its job and schema are those of its newest segment.
        job: of the segment to be added.
        features: its declared columns.
        path: the job file, for the error.

    Raises:
        SchemaError: naming the first key or column that differs, with both values.
    """
    added = check_features(dataset.features, features, path)
    pinned, given = flatten(asdict(dataset.job.data)), flatten(asdict(job.data))
    pinned["name"], given["name"] = dataset.job.name, job.name
    for found, each in ((pinned, dataset.job), (given, job)):
        last = each.data.split.evaluation_last
        found["data.split.evaluation_last"] = last and str(last)
    for key in sorted(pinned.keys() | given.keys()):
        if pinned.get(key) == given.get(key) or _may_differ(key, pinned, given, added):
            continue
        raise SchemaError(
            f"{key} must be {pinned.get(key)!r} as in the dataset, got {given.get(key)!r}; "
            "keep it, or build a new dataset",
            file=str(path),
        )


def check_types(dataset: Dataset, columns: Mapping[str, str], path: Path) -> None:
    """Refuse a segment whose columns have other Arrow types than those that are there.

    Args:
        dataset: an open dataset.
        columns: column to the name of its type, of the segment to be added.
        path: the job file, for the error.

    Raises:
        SchemaError: naming the first column that was retyped.
    """
    known = column_types(dataset)
    for name in sorted(known.keys() & columns.keys()):
        if known[name] != columns[name]:
            raise SchemaError(
                f"column {name!r} must be {known[name]} as in the dataset, got {columns[name]}; "
                "cast it in SQL, or build a new dataset",
                file=str(path),
            )


def flatten(value: object, key: str = "data") -> dict[str, Any]:
    """Return every value of nested mappings by its dotted key, free sections left out."""
    if not isinstance(value, Mapping):
        return {key: value}
    found: dict[str, Any] = {}
    for name, part in value.items():
        if key != "data" or name not in PER_SEGMENT_KEYS:
            found.update(flatten(part, f"{key}.{name}"))
    return found


def check_features(pinned: FeatureSet, given: FeatureSet, path: Path) -> frozenset[str]:
    """Compare declared columns; return the names of those that were added.

    Raises:
        SchemaError: one was removed or retyped, or an added one has no answer in older segments.
    """
    for feature in pinned.features:
        if feature.name not in given:
            raise SchemaError(
                f"column {feature.name!r} must be declared as in the dataset, got none; "
                f"{suggest_name_or(feature.name, given.names, _DECLARE_AGAIN)}",
                file=str(path.parent),
            )
        _check_same(feature, given[feature.name], path)
    added = [f for f in given.features if f.name not in pinned]
    for feature in added:
        _check_added(feature, path)
    return frozenset(f.name for f in added)


def _check_same(pinned: Feature, given: Feature, path: Path) -> None:
    for key in ("type", "role", "is_list", "default"):
        before, now = getattr(pinned, key), getattr(given, key)
        if before != now:
            raise SchemaError(
                f"{key} of column {pinned.name!r} must be {before!r} as in the dataset, got "
                f"{now!r}; keep it, or add a column of another name",
                file=str(path.parent),
            )


def _check_added(feature: Feature, path: Path) -> None:
    if feature.required or feature.role == "label":
        what = "required" if feature.required else "the label"
        raise SchemaError(
            f"added column {feature.name!r} must be nullable, got one that is {what}; older "
            "segments have no value: remove its presence, or build a new dataset",
            file=str(path.parent),
        )
    if feature.role == "weight" and feature.default is None:
        raise SchemaError(
            f"added weight {feature.name!r} must have a default, got none; declare one, such as 1",
            file=str(path.parent),
        )


def _may_differ(
    key: str, pinned: Mapping[str, Any], given: Mapping[str, Any], added: frozenset[str]
) -> bool:
    """Tell whether a key differs only because of added columns."""
    parts = key.split(".")
    if parts[:2] == ["data", "transforms"]:
        return key not in pinned and len(parts) > 3 and parts[3] in added
    if parts[:2] == ["data", "vocabularies"]:  # a new one; only added columns can read it
        return f"data.vocabularies.{parts[2]}.columns" not in pinned
    if parts[:2] != ["data", "tables"]:
        return False
    if key in pinned and parts[3:] == ["num_rows"] and given.get(f"{key[:-8]}rows") == "identity":
        return bool(given.get(key, 0) > pinned[key])  # room for more ids; those there stay rows
    features = f"data.tables.{parts[2]}.features"
    before, now = pinned.get(features, ()), given.get(features, ())
    if key not in pinned:  # a new table
        return features not in pinned and bool(now) and set(now) <= added
    return (
        key == features
        and bool(before)
        and now[: len(before)] == before
        and (set(now[len(before) :]) <= added)
    )


def check_admissible(
    request: BuildRequest,
    job: Job,
    features: FeatureSet,
    key: str,
    listing: tuple[InputFile, ...],
) -> Reference | None:
    """Tell before the work whether a segment may enter the dataset.

    Args:
        request: what is to be built.
        job: its job.
        features: declared columns.
        key: the hash in the segment's id.
        listing: its input.

    Returns:
        The segment when it is there already, None when it is to be built.

    Raises:
        SchemaError: the dataset holds something else, pins something else, or has the same input.
    """
    check_limits(parse_schema(request.schema_path(job).read_bytes()))
    root = read_root(request.dataset)
    there = find_segment(root, key)
    if there is not None:
        found = read_segment(request.dataset / SEGMENTS / there.id, there)
        check_label(request.dataset, found, request.day)
    if there is not None or root is None:
        return there
    if not request.append:
        refuse_other(request.dataset, [s.id for s in root.segments], key)
    version = version_of_day(request, root)
    if version is not None and not request.replaces:
        if same_files(version[1].listing, listing):
            return version[0]
        refuse_other_files(request.dataset, version[1])
    if version is not None:
        check_replaceable(request.dataset, root, version[1], listing)
    replaced = None if version is None else version[0]
    refuse_sealed(root, request.dataset)
    others = [s for s in root.segments if s != replaced]
    free_position(others, request.position, request.dataset)
    dataset = open_dataset(request.dataset)
    check_compatible(dataset, job, features, request.job_path)
    refuse_same_input(dataset, listing, request.job_path, replaced)
    return None


def version_of_day(
    request: BuildRequest, root: DatasetManifest
) -> tuple[Reference, SegmentManifest] | None:
    """Return the segment that holds the day of a request, None where there is none.

    Raises:
        SchemaError: the request has no day, and the segments have.
    """
    if request.day is None:
        refuse_without_day(request.dataset, root)
        return None
    return segment_of_day(request.dataset, root, request.day)


def refuse_other(dataset: Path, segments: list[str], key: str) -> None:
    """Refuse to build over a dataset that holds something else.

    Raises:
        SchemaError: always, naming what is there.
    """
    raise SchemaError(
        f"output must be empty or hold the same segment, got {segments} instead of one of "
        f"{key}; append to it, or choose another --output",
        file=str(dataset),
    )


def refuse_same_input(
    dataset: Dataset,
    listing: tuple[InputFile, ...],
    job: Path,
    replaced: Reference | None = None,
) -> None:
    """Refuse to add the very same files a second time under a changed job.

    Args:
        dataset: open dataset.
        listing: input of the new segment.
        job: the job file, for the error.
        replaced: the segment that the new one takes the place of.

    Raises:
        SchemaError: naming the segment that was built from them.
    """
    for segment in dataset.segments:
        is_replaced = replaced is not None and segment.manifest.id == replaced.id
        if not is_replaced and same_files(segment.manifest.listing, listing):
            raise SchemaError(
                f"input must be new to the dataset, got the files of segment "
                f"{segment.manifest.id}, built by another job; its samples would count twice: "
                "build a new dataset",
                file=str(job),
            )


def unpublished_segments(dataset: Path, key: str) -> Iterator[Path]:
    """Yield what killed attempts finished of the same segment without publishing it."""
    root = read_root(dataset)
    named = {s.id for s in root.segments} if root else set()
    for pattern in (f".{key}.*", f"*-{key}"):
        for directory in sorted((dataset / SEGMENTS).glob(pattern)):
            if directory.name in named or not (directory / MANIFEST).exists():
                continue
            if fitted_files_match(read_segment(directory).learned, dataset):
                yield directory


def refused_path(dataset: Path, key: str) -> Path:
    """Return where statistics and rejects of a segment are kept that does not enter the dataset."""
    return dataset / f".refused-{key}"


def commit_request(
    request: BuildRequest, job: Job, features: FeatureSet, key: str, building: Path
) -> CommitRequest:
    """Return what `publish` needs; the dataset may have changed since `admit`."""
    manifest = read_segment(building)
    schema = request.schema_path(job).read_bytes()

    def judge(dataset: Dataset | None, before: int) -> str:
        if dataset is not None:
            if not request.append:
                refuse_other(request.dataset, [s.manifest.id for s in dataset.segments], key)
            refuse_sealed(dataset.manifest, request.dataset)
            check_compatible(dataset, job, features, request.job_path)
            check_types(dataset, manifest.columns, request.job_path)
            check_fitted_files(manifest.learned, request.dataset)
        earlier = dataset.segments[before - 1].directory if dataset and before else None
        aside = refused_path(request.dataset, key)
        return pass_gate(
            building, earlier, parse_schema(schema), job.data.gate, aside, request.progress
        )

    return CommitRequest(
        dataset=request.dataset,
        building=building,
        key=key,
        position=request.position,
        day=request.day,
        replaces=request.replaces,
        name=job.name,
        job=request.job_bytes or request.job_path.read_bytes(),
        schema=schema,
        attempt=request.attempt,
        beam_args=request.beam_args,
        judge=judge,
    )
