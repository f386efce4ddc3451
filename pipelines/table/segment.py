"""Write the manifest of a segment from the results of its parts.

The files of a segment are written to its directory, its manifest last; for a dataset at an object
store, a build in one process writes them to a local directory, from which they are uploaded, and
workers of a distributed runner upload theirs themselves. `commit.py` adds the segment to the
dataset: if the process dies before, the dataset is unchanged.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory

import pyarrow as pa

from presage.pipelines.clustering.part import LOOKUPS, PartResult, merge_blocks
from presage.pipelines.clustering.storage_layout import DICTIONARY, open_writer
from presage.pipelines.oracle.numbering import NumberedTable
from presage.pipelines.quality.segment_statistics import (
    segment_slices,
    statistics_text,
    write_statistics,
)
from presage.pipelines.shuffle import SHUFFLE
from presage.pipelines.sources.rejects import RejectCounts
from presage.schemas.arrays import join_times
from presage.schemas.config.job import DataConfig
from presage.schemas.dataset.checked_files import CheckedFile
from presage.schemas.dataset.defaults import type_name
from presage.schemas.dataset.files import FileEntry, describe_file, sha256_of, write_files
from presage.schemas.dataset.group_files import group_schema
from presage.schemas.dataset.manifest import (
    GroupCounts,
    HistoryCounts,
    InputFile,
    Reference,
    SegmentManifest,
    TableCounts,
    hash_of,
    write_manifest,
)
from presage.schemas.dataset.opened import split_ranges
from presage.schemas.errors import SchemaError
from presage.schemas.features import FeatureSet
from presage.schemas.layout import (
    BLOCKS,
    DATA_DIRECTORIES,
    FILES,
    MANIFEST,
    SPLIT_TIME,
    internal_columns,
    part_path,
)
from presage.schemas.storage.local_files import PARTIAL
from presage.schemas.storage.location import Location


def group_counts(results: Sequence[PartResult]) -> dict[str, GroupCounts]:
    """Return the counts of each group over all parts."""
    num_samples = sum(r.num_samples for r in results)
    counts: dict[str, GroupCounts] = {}
    for group in results[0].groups:
        totals = [r.groups[group] for r in results]
        num_unique = sum(t.num_unique for t in totals)
        counts[group] = GroupCounts(
            num_unique=num_unique,
            dedup_factor=round(num_samples / num_unique, 6),
            num_values=sum(t.num_values for t in totals),
            num_values_dedup=sum(t.num_values_dedup for t in totals),
        )
    return counts


def table_counts(
    results: Sequence[PartResult], tables: Mapping[str, NumberedTable]
) -> dict[str, TableCounts]:
    """Return the counts of each table over all parts."""
    return {
        table: TableCounts(
            num_lookups=sum(r.lookups[table][0] for r in results),
            num_lookups_dedup=sum(r.lookups[table][1] for r in results),
            num_unique_rows=tables[table].num_rows,
        )
        for table in results[0].lookups
    }


def describe_files(root: Location | Path, written: Iterable[FileEntry] = ()) -> list[FileEntry]:
    """Return the entry of every file of a directory, except its manifest and indexes of files.

    `written` are entries that the writers of some files have returned; the other files are read.

    Raises:
        SchemaError: a file of `written` is missing or has another size.
    """
    root = Location.parse(root)
    sizes = {entry.path: entry.num_bytes for entry in root.entries()}
    entries = {entry.path: entry for entry in written}
    for path, entry in entries.items():
        if sizes.get(path) != entry.num_bytes:
            raise SchemaError(f"file of a part was removed: {path}; run the build again")
    unread = sizes.keys() - entries.keys() - {BLOCKS, FILES, MANIFEST}
    entries |= {path: describe_file(root / path, path) for path in unread}
    return [entries[path] for path in sorted(entries)]


def remove_partial(root: Location) -> None:
    """Remove the incomplete files of killed tasks below a directory; a store has none."""
    for path in [] if root.local is None else root.local.rglob(f"*{PARTIAL}"):
        path.unlink(missing_ok=True)


@contextmanager
def segment_directory(directory: Location, *, in_place: bool) -> Iterator[Location]:
    """Yield the directory in which to build a segment.

    It is `directory` itself if that is local or `in_place`; otherwise a temporary directory from
    which `publish` uploads the files.
    """
    if directory.local is not None or in_place:
        if directory.local is not None:
            directory.local.mkdir(parents=True)
        yield directory
        return
    with TemporaryDirectory(prefix="presage-build-") as name:
        yield Location.parse(name)


_UPLOADS = 8


def publish(root: Location, directory: Location) -> None:
    """Upload the files of a complete segment or index part, its manifest last.

    Nothing is done if it was written in place.
    """
    if directory != root:
        publish_files(root, directory)
        (directory / MANIFEST).copy_from(root / MANIFEST)


def publish_files(root: Location, directory: Location) -> None:
    """Copy the files below a directory to another one, all but a manifest."""
    paths = [entry.path for entry in root.entries() if entry.path != MANIFEST]
    with ThreadPoolExecutor(_UPLOADS) as pool:
        list(pool.map(lambda path: (directory / path).copy_from(root / path), paths))


def finish_segment(
    root: Location,
    results: Sequence[PartResult],
    rejects: RejectCounts,
    tables: Mapping[str, NumberedTable],
    listing: tuple[InputFile, ...],
    hashes: tuple[str, str],
    data: DataConfig,
    features: FeatureSet,
    fitted: Mapping[str, str],
    num_parts: int,
    histories: Mapping[str, HistoryCounts],
    written: Iterable[FileEntry] = (),
) -> None:
    """Complete a segment whose parts are written; its manifest is written last.

    `results` are of all parts in order, at least one, after `sum_statistics`; `hashes` are the
    sha256 of the job's data section and of the schema; `fitted` is path to sha256; `written` are
    entries of further files.
    """
    num_samples, num_rows = sum(r.num_samples for r in results), sum(r.num_rows for r in results)
    for scratch in (LOOKUPS, SHUFFLE):
        (root / scratch).remove_all()
    remove_partial(root)
    blocks = merge_blocks(r.blocks for r in results)
    encodings = {c: "DELTA_BINARY_PACKED" for c in blocks.column_names} | {
        "split": DICTIONARY,
        "weight": DICTIONARY,
    }
    with (root / BLOCKS).new_file() as partial:
        with open_writer(partial, blocks.schema, encodings) as writer:
            writer.write_table(blocks)
        blocks_sha256 = describe_file(partial, BLOCKS).sha256
    slices = segment_slices([result.slices for result in results])
    label_times = features.with_role("label_time")
    write_statistics(root, statistics_text(slices, data.session.key, label_times))
    groups = list(results[0].groups)
    of_parts = (each.files for each in (*results, *tables.values()))
    entries = describe_files(root, chain(written, *of_parts))
    files_sha256 = write_files(root / FILES, entries)
    hidden = internal_columns(groups, data.histories)
    columns = stored_columns(root, results[0].file_index, groups, hidden, entries).empty_table()
    manifest = SegmentManifest(
        num_samples=num_samples,
        num_sessions=sum(r.num_sessions for r in results),
        num_rejects=rejects.num_rejects,
        num_source_rows=None if num_rows == num_samples else num_rows,
        input_bytes=sum(f.num_bytes for f in listing),
        dataset_bytes=sum_bytes(entries, *DATA_DIRECTORIES),
        oracle_bytes=sum_bytes(entries, "access/", "edges/"),
        splits=split_ranges(blocks),
        groups=group_counts(results),
        tables=table_counts(results, tables),
        listing=listing,
        job_sha256=hashes[0],
        schema_sha256=hashes[1],
        blocks_sha256=blocks_sha256,
        files_sha256=files_sha256,
        directories=directories_of(entries),
        partition_key=data.session.key,
        num_parts=num_parts,
        columns={f.name: type_name(f.type) for f in join_times(columns).schema},
        split_times=tuple(f.name for f in columns.schema if f.type == SPLIT_TIME) or None,
        fitted=fitted,
        histories=histories,
    )
    write_manifest(root, manifest)


def stored_columns(
    root: Location,
    file_index: int,
    groups: Iterable[str],
    hidden: Container[str],
    entries: Iterable[FileEntry],
) -> pa.Schema:
    """Return all columns of the samples as one part stores them, but for hidden ones."""
    entry_of = {entry.path: entry for entry in entries}

    def schema_of(path: str) -> pa.Schema:
        return CheckedFile(root, entry_of[path]).metadata.schema.to_arrow_schema()

    fields = [f for f in schema_of(part_path(file_index, "samples")) if f.name not in hidden]
    fields += [f for g in groups for f in group_schema(schema_of, g, file_index)]
    return pa.schema(fields)


def directories_of(entries: Iterable[FileEntry]) -> tuple[str, ...]:
    """Return the sorted directories that contain files."""
    return tuple(sorted({entry.path.rpartition("/")[0] for entry in entries} - {""}))


def sum_bytes(entries: Sequence[FileEntry], *prefixes: str) -> int:
    """Return the bytes of all files whose paths have one of the prefixes."""
    return sum(e.num_bytes for e in entries if e.path.startswith(prefixes))


def segment_key(
    job_sha256: str, schema_sha256: str, listing: Sequence[InputFile], day: str | None
) -> str:
    """Return the hash in the id of a segment that was built; `day` is None unless rows have it."""
    days = [] if day is None else [day]
    return hash_of([job_sha256, schema_sha256, [asdict(f) for f in listing], *days])[:12]


def reads_day(data: DataConfig) -> bool:
    """Return whether the SQL may read the day of the segment, in column `_day`."""
    return any("_day" in config.partitions for config in data.inputs.values())


def rewritten_key(old_key: str, manifest: SegmentManifest) -> str:
    """Return the hash in the id of a rewritten segment.

    It is that of the old one and the new content, from which nothing about deleted samples can be
    derived.
    """
    content = [manifest.blocks_sha256, manifest.files_sha256, dict(manifest.fitted)]
    return hash_of([old_key, *content])[:12]


def directory_reference(directory: Location) -> Reference:
    """Return the reference of a complete segment, or part of an index."""
    return Reference(id=directory.name, manifest_sha256=sha256_of(directory / MANIFEST))
