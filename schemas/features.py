"""Columns of a dataset and their roles, kept as a tensorflow-metadata Schema.

`schema.pbtxt` beside the job file declares type, presence, domain and role (an annotation tag) of
each column of the samples. Each dataset holds a copy.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal, cast, get_args

from google.protobuf import text_format
from tensorflow_metadata.proto.v0 import schema_pb2

from presage.schemas.errors import SchemaError, suggest_name, suggest_name_or
from presage.schemas.layout import SAMPLE_WEIGHT
from presage.schemas.paths import is_below
from presage.schemas.storage.location import Location

Role = Literal["sparse", "dense", "label", "weight", "label_time", "kept"]
ROLES: tuple[str, ...] = get_args(Role)
"""`sparse`: ids of an embedding table; `dense`: a number that the model reads; `kept`: stored, but
not read by models."""

MAX_CHARACTERS = 4 << 20
"""Longest schema."""
MAX_FEATURES = 10_000
"""Maximum features of a schema."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Feature:
    """One column of the samples."""

    name: str
    role: Role
    type: Literal["INT", "FLOAT", "BYTES"]
    """tensorflow-metadata type; times are INT with a time domain."""
    is_list: bool
    required: bool
    """Whether samples without it are rejected."""
    minimum: float | None = None
    """Smallest allowed value, or None; ints stay exact."""
    maximum: float | None = None
    default: float | int | str | None = None
    """Value in segments built before the column was declared; None is null."""


@dataclass(frozen=True)
class FeatureSet:
    """All columns of the samples, in declaration order."""

    features: tuple[Feature, ...]

    def __getitem__(self, name: str) -> Feature:
        """Return a feature by name; raise SchemaError if it is not declared."""
        if name in self:
            return self._by_name[name]
        advice = suggest_name_or(name, self.names, "add it to the schema")
        raise SchemaError(f"feature is not declared: {name!r}; {advice}")

    def __contains__(self, name: str) -> bool:
        """Return whether a feature is declared."""
        return name in self._by_name

    @cached_property
    def _by_name(self) -> dict[str, Feature]:
        return {f.name: f for f in self.features}

    @property
    def names(self) -> tuple[str, ...]:
        """Names in declaration order."""
        return tuple(f.name for f in self.features)

    def with_role(self, role: Role) -> tuple[str, ...]:
        """Return the names of the features with a role, in declaration order."""
        return tuple(f.name for f in self.features if f.role == role)

    @property
    def label(self) -> str:
        """Name of the label.

        Raises:
            SchemaError: there is none, or several.
        """
        labels = self.with_role("label")
        if len(labels) != 1:
            raise SchemaError(f"schema must have one label, got {list(labels)}; tag one feature")
        return labels[0]

    @property
    def weight(self) -> str | None:
        """Name of the column with the weight of each sample; None if all weigh one."""
        if SAMPLE_WEIGHT in self:  # includes the job's own
            return SAMPLE_WEIGHT
        return next(iter(self.with_role("weight")), None)


def load_features(path: Path | Location) -> FeatureSet:
    """Read `schema.pbtxt`.

    Raises:
        SchemaError: the file is missing or invalid, or a role is unknown.
    """
    return parse_features(read_schema_text(path), str(path))


def read_schema_text(path: Path | Location) -> str:
    """Read the text of `schema.pbtxt`; raises as `load_features`."""
    try:
        return path.read_bytes().decode()
    except (OSError, UnicodeDecodeError) as error:
        raise _not_a_schema(error, str(path)) from error


def parse_features(text: str, name: str) -> FeatureSet:
    """Parse the content of `schema.pbtxt`; `name` is used in errors.

    Raises:
        SchemaError: it is invalid, or a role is unknown.
    """
    if len(text) > MAX_CHARACTERS:
        raise SchemaError(
            f"schema must have at most {MAX_CHARACTERS:,} characters, got {len(text):,}; leave out "
            "features that no model reads",
            file=name,
        )
    try:
        proto = text_format.Parse(text, schema_pb2.Schema())
    except text_format.ParseError as error:
        raise _not_a_schema(error, name) from error
    except RecursionError as error:
        raise SchemaError(
            "braces of the schema are nested too deeply; see docs/job.md", file=name
        ) from error
    try:
        return _features_of(proto)
    except SchemaError as error:
        error.file = name
        raise


def _not_a_schema(error: Exception, name: str) -> SchemaError:
    return SchemaError(
        f"schema is not a tensorflow-metadata Schema in text form: {error}; see docs/job.md",
        file=name,
    )


def _features_of(proto: schema_pb2.Schema) -> FeatureSet:
    defaults = _defaults(proto)
    features = tuple(_feature(f, defaults.get(f.name)) for f in proto.feature)
    names = [f.name for f in features]
    if len(names) > MAX_FEATURES:
        raise SchemaError(
            f"schema must have at most {MAX_FEATURES:,} features, got {len(names):,}; leave out "
            "those that no model reads"
        )
    for name, count in Counter(names).items():
        if count > 1:
            raise SchemaError(f"duplicate feature: {name!r}; keep one")
        if not is_below(name):  # buffers of a list feature are in a folder of its name
            raise SchemaError(
                f"feature name must not contain '..' or start with '/', got {name!r}; rename it"
            )
    return FeatureSet(features)


def _defaults(proto: schema_pb2.Schema) -> dict[str, float | int | str]:
    """Return the default values of the schema's dense tensors by column."""
    defaults: dict[str, float | int | str] = {}
    for group in proto.tensor_representation_group.values():
        for representation in group.tensor_representation.values():
            tensor = representation.dense_tensor
            kind = tensor.default_value.WhichOneof("kind")
            if kind is not None:
                value = getattr(tensor.default_value, kind)
                defaults[tensor.column_name] = value.decode() if kind == "bytes_value" else value
    return defaults


_DEFAULT_TYPES = {"INT": (int,), "FLOAT": (int, float), "BYTES": (str,)}


def _check_default(feature: Feature) -> None:
    value = feature.default
    if value is None:
        return
    if feature.is_list or feature.role == "sparse":
        kind = "a list" if feature.is_list else "sparse"
        raise SchemaError(
            f"default of feature {feature.name!r} is not supported, as the column is {kind}: "
            f"{value!r}; remove it, and older segments have null"
        )
    if not isinstance(value, _DEFAULT_TYPES[feature.type]):
        raise SchemaError(
            f"default of feature {feature.name!r} must be {feature.type}, got {value!r}; "
            "write int_value, float_value or bytes_value"
        )


def _feature(proto: schema_pb2.Feature, default: float | int | str | None) -> Feature:
    tags = list(proto.annotation.tag)
    if len(tags) != 1 or tags[0] not in ROLES:
        advice = (
            suggest_name(tags[0], ROLES) if len(tags) == 1 else f"use one of {', '.join(ROLES)}"
        )
        raise SchemaError(f"feature {proto.name!r} must have one role tag, got {tags}; {advice}")
    kind = schema_pb2.FeatureType.Name(proto.type)
    if kind not in ("INT", "FLOAT", "BYTES"):
        raise SchemaError(
            f"feature {proto.name!r} must have type INT, FLOAT or BYTES, got {kind}; add it"
        )
    domain = proto.WhichOneof("domain_info")
    limits = getattr(proto, domain) if domain in ("int_domain", "float_domain") else None
    feature = Feature(
        name=proto.name,
        role=cast(Role, tags[0]),
        type=kind,
        is_list=proto.HasField("value_count"),
        required=proto.presence.min_fraction == 1.0,
        minimum=limits.min if limits is not None and limits.HasField("min") else None,
        maximum=limits.max if limits is not None and limits.HasField("max") else None,
        default=default,
    )
    if None not in (feature.minimum, feature.maximum) and feature.minimum > feature.maximum:  # type: ignore[operator]
        raise SchemaError(
            f"feature {proto.name!r} must have a domain from min to max, got "
            f"{feature.minimum} to {feature.maximum}; swap them"
        )
    _check_default(feature)
    return feature
