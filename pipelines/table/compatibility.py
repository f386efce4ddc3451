"""Which jobs may append to a dataset, and which segments it accepts.

Readers use one job and one schema for all segments. So settings that determine the layout or the
meaning of the bytes are fixed by the first segment; a job that changes them is refused. Settings
that only select rows may change from segment to segment, and columns may be added if older segments
have a default for them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pipelines.context import BuildRequest
from pipelines.quality.gate import check_limits, parse_schema, pass_gate
from pipelines.table.commit import (
    NewSegment,
    check_day,
    check_replaceable,
    day_exists_error,
    find_segment,
    free_position,
    refuse_sealed,
    refuse_without_day,
    same_files,
    segment_of_day,
)
from pipelines.table.indexes import PartBuilder
from pipelines.transforms.fit import check_fitted_files
from schemas.config.job import DataConfig, Job
from schemas.dataset import Dataset, open_root
from schemas.errors import SchemaError, suggest_name_or
from schemas.features import Feature, FeatureSet
from schemas.manifest import (
    DatasetManifest,
    InputFile,
    Reference,
    SegmentManifest,
    find_root,
    read_segment,
)
from schemas.storage import Location

PER_SEGMENT_KEYS = frozenset(
    {"sources", "sides", "samples", "split", "on_error", "generate", "schema", "gate"}
)
"""Keys of `data` that may differ between segments."""

_DECLARE_AGAIN = "declare it and let the job's SQL yield it, NULL where there is none"

NOT_IN_ID = frozenset({"gate", "generate", "oracle", "schema"})
"""Keys of `data` that are not in the segment's id, as they do not change the samples; the content
of the file `schema` is hashed apart."""


def identity_of(data: DataConfig) -> dict[str, Any]:
    """Return the part of the data section that determines the content of a segment."""
    identity = {key: value for key, value in asdict(data).items() if key not in NOT_IN_ID}
    del identity["samples"]["limits"]
    return identity


def check_compatible(
    dataset: Dataset, job: Job, features: FeatureSet, path: Path | Location
) -> None:
    """Refuse a job whose segment could not be read together with the segments of the dataset.

    Job and schema of the open dataset are those of its newest segment.

    Raises:
        SchemaError: a key or column differs; the message has both values of the first one.
    """
    added = check_features(dataset.features, features, path)
    old, new = _fixed_keys(dataset.job), _fixed_keys(job)
    for key in sorted(old.keys() | new.keys()):
        if old.get(key) == new.get(key) or _may_differ(key, old, new, added):
            continue
        raise SchemaError(
            f"{key} must be {old.get(key)!r} as in the dataset, got {new.get(key)!r}; "
            "keep it, or build a new dataset",
            file=str(path),
        )


def check_types(dataset: Dataset, columns: Mapping[str, str], path: Path | Location) -> None:
    """Refuse a segment whose columns have other Arrow types than those of the dataset.

    `columns` are those of the new segment, with the names of their types.

    Raises:
        SchemaError: a column has another type.
    """
    types = dataset.column_types
    for name in sorted(types.keys() & columns.keys()):
        if types[name] != columns[name]:
            raise SchemaError(
                f"column {name!r} must be {types[name]} as in the dataset, got {columns[name]}; "
                "cast it in SQL, or build a new dataset",
                file=str(path),
            )


def _fixed_keys(job: Job) -> dict[str, Any]:
    """Return the values of a job that are fixed by the first segment, by dotted key."""
    last = job.data.split.evaluation_last
    fixed = {"name": job.name, "data.split.evaluation_last": last and str(last)}
    return flatten(asdict(job.data)) | fixed


def flatten(value: object, key: str = "data") -> dict[str, Any]:
    """Return the values of nested mappings by dotted key, without `PER_SEGMENT_KEYS`."""
    if not isinstance(value, Mapping):
        return {key: value}
    flat: dict[str, Any] = {}
    for name, part in value.items():
        if key != "data" or name not in PER_SEGMENT_KEYS:
            flat.update(flatten(part, f"{key}.{name}"))
    return flat


def check_features(old: FeatureSet, new: FeatureSet, path: Path | Location) -> frozenset[str]:
    """Compare declared columns; return the names of added ones.

    Raises:
        SchemaError: a column was removed or retyped, or an added one has no value in older
            segments.
    """
    for feature in old.features:
        if feature.name not in new:
            raise SchemaError(
                f"column of the dataset is not declared: {feature.name!r}; "
                f"{suggest_name_or(feature.name, new.names, _DECLARE_AGAIN)}",
                file=str(path.parent),
            )
        _check_same(feature, new[feature.name], path)
    added = [f for f in new.features if f.name not in old]
    for feature in added:
        _check_added(feature, path)
    return frozenset(f.name for f in added)


def _check_same(old: Feature, new: Feature, path: Path | Location) -> None:
    for key in ("type", "role", "is_list", "default"):
        old_value, new_value = getattr(old, key), getattr(new, key)
        if old_value != new_value:
            raise SchemaError(
                f"{key} of column {old.name!r} must be {old_value!r} as in the dataset, got "
                f"{new_value!r}; keep it, or add a column of another name",
                file=str(path.parent),
            )


def _check_added(feature: Feature, path: Path | Location) -> None:
    if feature.required or feature.role == "label":
        reason = "is required" if feature.required else "is the label"
        raise SchemaError(
            f"added column {feature.name!r} {reason}, but older segments have no value; "
            "remove its presence, or build a new dataset",
            file=str(path.parent),
        )
    if feature.role == "weight" and feature.default is None:
        raise SchemaError(
            f"added weight {feature.name!r} has no default; declare one, such as 1",
            file=str(path.parent),
        )


def _may_differ(
    key: str, old: Mapping[str, Any], new: Mapping[str, Any], added: frozenset[str]
) -> bool:
    """Return whether a key may differ: added columns, more rows of identity ids, another index."""
    parts = key.split(".")
    if parts[:2] == ["data", "oracle"]:  # trainers read the order of blocks from the dataset
        return parts[2] != "order"
    if parts[:2] == ["data", "transforms"]:
        return key not in old and len(parts) > 3 and parts[3] in added
    if parts[:2] == ["data", "vocabularies"]:  # a new one: only added columns can use it
        return f"data.vocabularies.{parts[2]}.columns" not in old
    if parts[:2] != ["data", "tables"]:
        return False
    if key in old and parts[3:] == ["num_rows"] and new.get(f"{key[:-8]}rows") == "identity":
        return bool(new.get(key, 0) > old[key])
    features = f"data.tables.{parts[2]}.features"
    old_features, new_features = old.get(features, ()), new.get(features, ())
    if key not in old:  # a new table
        return features not in old and bool(new_features) and set(new_features) <= added
    return (
        key == features
        and bool(old_features)
        and new_features[: len(old_features)] == old_features
        and (set(new_features[len(old_features) :]) <= added)
    )


def check_admissible(
    request: BuildRequest,
    job: Job,
    features: FeatureSet,
    key: str,
    listing: tuple[InputFile, ...],
) -> Reference | None:
    """Check before the build whether a segment may be added to the dataset.

    `key` is the hash in the segment's id.

    Returns:
        The segment if the dataset already has it; None if it is to be built.

    Raises:
        SchemaError: the dataset has other content or settings, or the same input.
    """
    check_limits(parse_schema(request.read_schema(job)))
    found = find_root(request.dataset)
    root = None if found is None else found.manifest
    existing = find_segment(root, key)
    if existing is not None:
        check_day(request.dataset, existing, request.day)
    if existing is not None or root is None:
        return existing
    if not request.append:
        raise _not_empty_error(request.dataset, [s.id for s in root.segments], key)
    version = version_of_day(request, root)
    if version is not None and not request.replaces:
        if same_files(version[1].listing, listing):
            return version[0]
        raise day_exists_error(request.dataset, version[0])
    if version is not None:
        check_replaceable(request.dataset, root, *version, listing)
    replaced = None if version is None else version[0]
    refuse_sealed(root, request.dataset)
    others = [s for s in root.segments if s != replaced]
    free_position(others, request.position, request.dataset)
    dataset = open_root(request.dataset, root)
    check_compatible(dataset, job, features, request.job_path)
    refuse_same_input(dataset, listing, request.job_path, replaced)
    return None


def version_of_day(
    request: BuildRequest, root: DatasetManifest
) -> tuple[Reference, SegmentManifest] | None:
    """Return the segment of the day of a request, if there is one.

    Raises:
        SchemaError: the request has no day, but the segments have.
    """
    if request.day is None:
        refuse_without_day(request.dataset, root)
        return None
    return segment_of_day(request.dataset, root, request.day)


def _not_empty_error(dataset: Location, segments: list[str], key: str) -> SchemaError:
    return SchemaError(
        f"output must be empty or hold the same segment, got {segments} instead of one of "
        f"{key}; append to it, or choose another --output",
        file=str(dataset),
    )


def refuse_same_input(
    dataset: Dataset,
    listing: tuple[InputFile, ...],
    job: Path | Location,
    replaced: Reference | None = None,
) -> None:
    """Raise SchemaError if a segment, except `replaced`, has the same input files."""
    for segment in dataset.segments:
        is_replaced = replaced is not None and segment.id == replaced.id
        if not is_replaced and same_files(segment.manifest.listing, listing):
            raise SchemaError(
                f"input files are already in the dataset, in segment {segment.id} of "
                "another job; build a new dataset, or samples would count twice",
                file=str(job),
            )


def refused_path(dataset: Location, key: str) -> Location:
    """Return the directory for statistics and rejects of a segment that fails the gate."""
    return dataset / f".refused-{key}"


def new_segment(
    request: BuildRequest, job: Job, features: FeatureSet, key: str, directory: Location
) -> NewSegment:
    """Return a segment to commit; its `validate` repeats the checks against the current dataset."""
    manifest = read_segment(directory)
    schema = request.read_schema(job)

    def validate(dataset: Dataset | None, num_before: int) -> str:
        if dataset is not None:
            if not request.append:
                ids = [s.id for s in dataset.segments]
                raise _not_empty_error(request.dataset, ids, key)
            refuse_sealed(dataset.manifest, request.dataset)
            check_compatible(dataset, job, features, request.job_path)
            check_types(dataset, manifest.columns, request.job_path)
            check_fitted_files(manifest.fitted, request.dataset)
        earlier = dataset.segments[num_before - 1] if dataset and num_before else None
        refused = refused_path(request.dataset, key)
        return pass_gate(
            directory, earlier, parse_schema(schema), job.data.gate, refused, request.progress
        )

    return NewSegment(
        directory=directory,
        key=key,
        name=job.name,
        job=request.job_bytes or request.job_path.read_bytes(),
        schema=schema,
        validate=validate,
        parts=PartBuilder(request.dataset, request.beam_args),
    )
