"""Blank the entries of vocabularies that only erased samples have."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import sha256

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from presage.pipelines.transforms.fit import free_path
from presage.schemas.arrays import is_list, one_chunk
from presage.schemas.dataset.fitted import (
    VOCABULARIES,
    encode_table,
    load_vocabulary_versions,
    version_path,
)
from presage.schemas.dataset.opened import OpenDataset, Segment
from presage.schemas.dataset.samples import read_sample_column, row_groups

BlankedVocabularies = Mapping[str, tuple[str, bytes]]
"""Path of a replaced file of a vocabulary to the path and the content of the new one."""


def with_blanked_files(fitted: Mapping[str, str], blanked: BlankedVocabularies) -> dict[str, str]:
    """Return the files, path to sha256, that a segment's new manifest names."""
    files = dict(fitted)
    for old_path, (path, content) in blanked.items():
        if files.pop(old_path, None) is not None:
            files[path] = sha256(content).hexdigest()
    return dict(sorted(files.items()))


def blank_vocabularies(dataset: OpenDataset) -> BlankedVocabularies:
    """Return vocabularies without the values that only deleted samples have."""
    blanked: dict[str, tuple[str, bytes]] = {}
    fitted = {p: h for s in dataset.segments for p, h in s.manifest.fitted.items()}
    for name, config in dataset.job.data.vocabularies.items():
        versions = load_vocabulary_versions(dataset.directory, fitted, name)
        values = _values_of_deleted_samples(dataset, config.columns) if versions else None
        if values is None or not len(values):
            continue
        old_paths = sorted(p for p in fitted if p.startswith(f"{VOCABULARIES}/{name}/"))
        for number, (path, table) in enumerate(zip(old_paths, versions, strict=True)):
            value_set = values.cast(table["value"].type)
            mask = pc.is_in(one_chunk(table["value"]), value_set=value_set, skip_nulls=True)
            if not pc.any(mask).as_py():
                continue
            content = encode_table(_blank_entries(table, mask))
            target = free_path(dataset.directory, version_path(name, number, content))
            blanked[path] = target, content
    return blanked


def _blank_entries(table: pa.Table, mask: pa.Array) -> pa.Table:
    """Set the values of some entries to null and their counts to 0; row numbers do not change."""
    null, zero = pa.scalar(None, table["value"].type), pa.scalar(0, pa.int64())
    columns = {name: table[name] for name in table.column_names}
    columns["value"] = pc.if_else(mask, null, table["value"])
    columns["count"] = pc.if_else(mask, zero, table["count"])
    return pa.table(columns, schema=table.schema)


def _values_of_deleted_samples(dataset: OpenDataset, columns: tuple[str, ...]) -> pa.Array | None:
    """Return the values of some columns that deleted samples have, and no other sample."""
    parts = [
        (segment, file_index, row_group, column)
        for column in columns
        for segment in dataset.segments
        if column in segment.manifest.columns
        for file_index, row_group in row_groups(segment)
    ]
    deleted = [
        pc.unique(_values(dataset, *part, is_deleted=True))
        for part in parts
        if len(part[0].deleted_rows(part[1], part[2]))
    ]
    if not any(map(len, deleted)):
        return None
    remaining = pc.unique(pa.chunked_array(deleted))
    for part in parts:
        if len(remaining):
            others = _values(dataset, *part, is_deleted=False)
            shared = others.filter(pc.is_in(others, value_set=remaining))
            remaining = remaining.filter(pc.invert(pc.is_in(remaining, value_set=shared)))
    return remaining


def _values(
    dataset: OpenDataset,
    segment: Segment,
    file_index: int,
    row_group: int,
    column: str,
    *,
    is_deleted: bool,
) -> pa.Array:
    """Return the values of the deleted samples of a row group, or of the others."""
    values = read_sample_column(segment, file_index, row_group, dataset.job.data, column)
    selected = np.full(len(values), not is_deleted)
    selected[segment.deleted_rows(file_index, row_group)] = is_deleted
    return _flatten(values.filter(pa.array(selected)))


def _flatten(values: pa.Array) -> pa.Array:
    """Return values, or the entries of lists, as int64 or string without nulls."""
    flat = values.flatten() if is_list(values.type) else values
    kind = pa.int64() if pa.types.is_integer(flat.type) else pa.string()
    return flat.drop_null().cast(kind)
