"""Write the manifest of a segment from the results of its parts.

The files of a segment are written to a local directory, its manifest last. For a dataset on a local
disk that is the directory of the segment; otherwise the files are uploaded to it. `commit.py` adds
the segment to the dataset: if the process dies before, the dataset is unchanged.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pyarrow as pa
import pyarrow.parquet as pq

from pipelines.clustering.layout import DICTIONARY, Encodings, open_writer
from pipelines.clustering.part import LOOKUPS, PartResult
from pipelines.clustering.writer import merge_blocks
from pipelines.quality.segment_statistics import segment_slices, statistics_text, write_statistics
from pipelines.scratch import remove_partial
from pipelines.shuffle import SHUFFLE
from pipelines.sources.rejects import RejectCounts, number_reject_files
from schemas.config.job import DataConfig
from schemas.dataset import type_name
from schemas.errors import SchemaError
from schemas.features import FeatureSet
from schemas.files import FileEntry, describe_file, sha256_of, sync_file, write_files
from schemas.group_files import group_schema
from schemas.layout import (
    BLOCK,
    BLOCKS,
    DATA_DIRECTORIES,
    EVALUATION,
    FILES,
    MANIFEST,
    TRAIN,
    inverse_column,
    samples_path,
)
from schemas.manifest import (
    GroupCounts,
    InputFile,
    Reference,
    SegmentManifest,
    TableCounts,
    write_manifest,
)
from schemas.storage import Location


def split_ranges(blocks: pa.Table) -> dict[str, tuple[int, int]]:
    """Return (first position, number of blocks) of each split that has blocks."""
    names = blocks["split"].to_pylist()
    counts = {name: names.count(name) for name in (TRAIN, EVALUATION)}
    return {n: (names.index(n), counts[n]) for n in (TRAIN, EVALUATION) if counts[n]}


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
    results: Sequence[PartResult], num_unique_rows: Mapping[str, int]
) -> dict[str, TableCounts]:
    """Return the counts of each table over all parts."""
    return {
        table: TableCounts(
            num_lookups=sum(r.lookups[table][0] for r in results),
            num_lookups_dedup=sum(r.lookups[table][1] for r in results),
            num_unique_rows=num_unique_rows[table],
        )
        for table in results[0].lookups
    }


def describe_files(root: Path) -> list[FileEntry]:
    """Return the entry of every file of a directory, except its manifest and indexes of files."""
    location = Location.parse(root)
    paths = (entry.path for entry in location.entries())
    return [describe_file(location, p) for p in paths if p not in (BLOCKS, FILES, MANIFEST)]


@contextmanager
def local_directory(directory: Location, work: Path | None) -> Iterator[Path]:
    """Yield a local directory for a segment: its own if it is local, otherwise a temporary one.

    Args:
        directory: of the segment.
        work: where temporary directories are made; the system's choice if None.
    """
    if directory.local is not None:
        directory.local.mkdir(parents=True)
        yield directory.local
        return
    if work is not None:
        work.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix="presage-build-", dir=work) as name:
        yield Path(name)


_UPLOADS = 8


def publish(root: Path, directory: Location) -> None:
    """Upload the files of a complete segment or index part, its manifest last.

    Nothing is done if it was written in place.
    """
    if directory.local == root:
        return
    paths = [entry.path for entry in Location.parse(root).entries() if entry.path != MANIFEST]
    with ThreadPoolExecutor(_UPLOADS) as pool:
        list(pool.map(lambda path: (directory / path).upload(root / path), paths))
    (directory / MANIFEST).upload(root / MANIFEST)


def finish_segment(
    root: Path,
    results: Sequence[PartResult],
    rejects: RejectCounts,
    num_unique_rows: Mapping[str, int],
    listing: tuple[InputFile, ...],
    hashes: tuple[str, str],
    data: DataConfig,
    features: FeatureSet,
    learned: Mapping[str, str],
    num_parts: int | None,
) -> SegmentManifest:
    """Complete a segment whose parts are written; its manifest is written last.

    Args:
        root: directory of the segment being built.
        results: results of all parts in order, at least one.
        rejects: counts of rejected rows, written by `write_rejects`.
        num_unique_rows: distinct rows by table.
        listing: input files.
        hashes: sha256 of the job's data section and of the schema.
        data: the job's data section.
        features: declared columns.
        learned: files of fitted parameters in the dataset, path to sha256.
        num_parts: parts that the hash of the session key was divided into.
    """
    num_samples, num_rows = sum(r.num_samples for r in results), sum(r.num_rows for r in results)
    for scratch in (LOOKUPS, SHUFFLE):
        shutil.rmtree(root / scratch, ignore_errors=True)
    remove_partial(root)
    blocks = merge_blocks(r.blocks for r in results)
    encodings = {c: "DELTA_BINARY_PACKED" for c in blocks.column_names} | {"split": DICTIONARY}
    with open_writer(root / BLOCKS, blocks.schema, Encodings(encodings)) as writer:
        writer.write_table(blocks)
    sync_file(root / BLOCKS)
    number_reject_files(root)
    text = statistics_text(segment_slices([r.slices for r in results], data, features))
    write_statistics(root, text)
    groups = list(results[0].groups)
    entries = describe_files(root)
    _check_parts(results, entries)
    files_sha256 = write_files(Location.parse(root / FILES), entries)
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
        tables=table_counts(results, num_unique_rows),
        listing=listing,
        job_sha256=hashes[0],
        schema_sha256=hashes[1],
        blocks_sha256=sha256_of(root / BLOCKS),
        files_sha256=files_sha256,
        directories=directories_of(entries),
        partition_key=None if num_parts is None else data.session.key,
        num_parts=num_parts,
        columns=stored_columns(root, results[0].file_index, groups),
        learned=learned,
    )
    write_manifest(Location.parse(root), manifest)
    return manifest


def _check_parts(results: Sequence[PartResult], entries: Sequence[FileEntry]) -> None:
    """Raise SchemaError if a part that was written has no file any more."""
    paths = {entry.path for entry in entries}
    for path in (samples_path(result.file_index) for result in results):
        if path not in paths:
            raise SchemaError(f"file of a part was removed: {path}; run the build again")


def stored_columns(root: Path, file_index: int, groups: Iterable[str]) -> dict[str, str]:
    """Return the types of all columns of the samples as one part stores them."""

    def schema_of(path: str) -> pa.Schema:
        return pq.read_schema(root / path)

    hidden = {BLOCK, *map(inverse_column, groups)}
    fields = [f for f in schema_of(samples_path(file_index)) if f.name not in hidden]
    fields += [f for g in groups for f in group_schema(schema_of, g, file_index)]
    return {f.name: type_name(f.type) for f in fields}


def directories_of(entries: Iterable[FileEntry]) -> tuple[str, ...]:
    """Return the sorted directories that contain files."""
    return tuple(sorted({entry.path.rpartition("/")[0] for entry in entries} - {""}))


def sum_bytes(entries: Sequence[FileEntry], *prefixes: str) -> int:
    """Return the bytes of all files whose paths have one of the prefixes."""
    return sum(e.num_bytes for e in entries if e.path.startswith(prefixes))


def directory_reference(directory: Location) -> Reference:
    """Return the reference of a complete segment, or part of an index."""
    return Reference(id=directory.name, manifest_sha256=sha256_of(directory / MANIFEST))
