"""Which jobs may append to a dataset.

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

from presage.pipelines.table.target import JobFiles
from presage.schemas.config.job import DataConfig, Job
from presage.schemas.dataset.opened import OpenDataset
from presage.schemas.errors import SchemaError, suggest_name_or
from presage.schemas.features import Feature, FeatureSet
from presage.schemas.storage.location import Location

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


def check_compatible(dataset: OpenDataset, job: JobFiles) -> None:
    """Refuse a job whose segment could not be read together with the segments of the dataset.

    Job and schema of the open dataset are those of its newest segment.

    Raises:
        SchemaError: a key or column differs; the message has both values of the first one.
    """
    added = check_features(dataset.features, job.features, job.path)
    old, new = _fixed_keys(dataset.job), _fixed_keys(job.config)
    for key in sorted(old.keys() | new.keys()):
        if old.get(key) == new.get(key) or _may_differ(key, old, new, added):
            continue
        raise SchemaError(
            f"{key} must be {old.get(key)!r} as in the dataset, got {new.get(key)!r}; "
            "keep it, or build a new dataset",
            file=str(job.path),
        )


def check_types(dataset: OpenDataset, columns: Mapping[str, str], path: Path | Location) -> None:
    """Check that the columns of a segment have the Arrow types of those of the dataset.

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
