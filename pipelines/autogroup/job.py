"""Replace `groups: auto` in a job by named groups, chosen on a sample of whole sessions."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import yaml
from numpy.typing import NDArray

from pipelines.autogroup.costs import BYTES_PER_GROUP, Costs, feature_of
from pipelines.autogroup.search import ChosenGroup, GroupChoice, choose_groups
from pipelines.clustering.order import cluster
from pipelines.context import BuildContext, BuildRequest
from pipelines.executor import OutputCollector, SourceRows, iter_samples, read_all
from pipelines.partition import hash_session_keys, microseconds
from pipelines.prepare import build_context, count_parts, prepare
from pipelines.progress import counted_rows, counting
from pipelines.samples.lookups import key_column, key_hashes, key_type
from pipelines.samples.tuples import separate
from pipelines.sources.read import read_part
from pipelines.sources.rows import ORIGIN, FilePart
from pipelines.stages import cut_file, good_side_rows, read_rows
from pipelines.transforms.apply import inputs_of
from schemas.arrays import is_list, one_chunk
from schemas.config.job import SAMPLES, DataConfig, Job, load_job
from schemas.config.transforms import TransformConfig
from schemas.dataset import verify_file
from schemas.errors import SchemaError
from schemas.features import FeatureSet
from schemas.layout import JOB, MANIFEST
from schemas.manifest import read_dataset

# The samples that `groups: auto` looks at: whole sessions of the training range, by hash.
#
# The sessions with the smallest hashes of their keys are taken, as many as fit: so the sample
# depends on nothing but the log. That hash also places sessions in the dataset, so the sample is
# what the first blocks of the build hold.
#
# What is read is bounded. Without `samples.per`: the beginning of each source, `INPUT_BYTES` in
# all; sessions that may continue after that are left out where others are enough. `samples.per`:
# the key columns of all files, and then the row groups of some keys, chosen by hash, as long as
# these take no more than `INPUT_BYTES`: so every key is whole. Side tables are read whole; of a
# large one only the rows that are looked up are kept.
#
# The samples are made by the stages of a build, so events, SQL per key, SQL per row, look-ups and
# sampling apply as they do there.

INPUT_BYTES = 256 << 20
"""Bytes of input files that are read at most, but for key columns and for one key."""
MAX_CELLS = 1 << 21
"""Values in the sample at most, list values included: some 15,000 samples of the demo."""
MAX_RAW_ROWS = 1 << 18
"""Raw rows of `samples.per` at most, but for one key."""
_EDGE = 8
"""Of a log that is not read to its end, the last one of so many parts is the edge: its sessions may
continue."""


@dataclass(slots=True)
class SmallestHashes:
    """Keeps the rows with the smallest hashes, whole hashes, as many as fit.

    What is kept depends on the set of rows that were added, not on their order: whatever a part of
    them pushes out, all of them would.

    Attributes:
        max_cells: values to keep at most; only the rows of the smallest hash are ever cut to fit,
            to those of the smallest origins.
        bound: only rows with hashes up to it are kept.
    """

    max_cells: int
    bound: int = (1 << 64) - 1
    table: pa.Table | None = None
    hashes: NDArray[np.uint64] = field(default_factory=lambda: np.empty(0, np.uint64))

    def add(self, table: pa.Table, hashes: NDArray[np.uint64]) -> None:
        """Add rows; what does not fit is forgotten, highest hashes first."""
        below = hashes <= np.uint64(self.bound)
        table = table.filter(pa.array(below))
        joined = table if self.table is None else pa.concat_tables([self.table, table])
        hashes = np.concatenate([self.hashes, hashes[below]])
        cells = cells_of(joined)
        if cells.sum() > self.max_cells:
            unique, inverse = np.unique(hashes, return_inverse=True)
            total = np.cumsum(np.bincount(inverse, cells))
            num_fitting = max(1, int(np.searchsorted(total, self.max_cells, side="right")))
            kept = np.flatnonzero(inverse < num_fitting)
            if num_fitting < len(unique):
                self.bound = int(unique[num_fitting]) - 1
            if num_fitting == 1 and total[0] > self.max_cells:
                kept = kept[np.argsort(joined[ORIGIN].to_numpy()[kept], kind="stable")]
                kept = kept[: int(np.searchsorted(np.cumsum(cells[kept]), self.max_cells)) + 1]
            joined, hashes = joined.take(pa.array(kept)), hashes[kept]
        self.table, self.hashes = joined, hashes


def cells_of(table: pa.Table) -> NDArray[np.int64]:
    """Return how many values each row has."""
    cells = np.full(table.num_rows, table.num_columns, np.int64)
    for name in table.column_names:
        if is_list(table.schema.field(name).type):
            lengths = pc.fill_null(pc.list_value_length(table[name]), 0)
            cells += one_chunk(lengths).to_numpy().astype(np.int64)
    return cells


@dataclass(frozen=True, slots=True)
class SessionSample:
    """Samples of whole sessions.

    Attributes:
        rows: samples with origins and list indices.
        share: of all sessions, about.
    """

    rows: pa.Table
    share: float


def sample_sessions(context: BuildContext) -> SessionSample | None:
    """Return samples of whole sessions of the training range, or None when there are none.

    Args:
        context: of a build without groups.
    """
    data = context.data
    num_parts = min(context.num_parts, count_parts(INPUT_BYTES))
    context = replace(context, num_parts=num_parts, shuffle_by="memory")
    kept = SmallestHashes(MAX_CELLS)
    edge: list[NDArray[np.int64]] = [np.empty(0, np.int64)]
    edge_keys: list[NDArray[np.uint64]] = []
    collected = OutputCollector(keep=False)
    sides = read_all(context, collected, context.broadcast)
    rows = _first_rows(context, edge) if data.samples.per is None else _rows_of_keys(context)
    looked_up = partial(_rows_looked_up, context)
    for _, sent in iter_samples(context, chain(sides, rows), collected, looked_up):
        good = sent.samples.filter(pa.array(_in_training(sent.samples, data)))
        if good.num_rows:
            hashes = hash_session_keys(good[data.session.key])
            is_edge = np.isin(good[ORIGIN].to_numpy(), np.concatenate(edge))
            edge_keys.append(np.unique(hashes[is_edge]))
            kept.add(good, hashes)
    if kept.table is None:
        return None
    total = sum(f.num_bytes for f in context.listing if f.source in data.sources)
    share = min(1.0, INPUT_BYTES / max(1, total)) * (kept.bound + 1) / 2**64
    continues = np.isin(kept.hashes, np.concatenate(edge_keys))
    if not continues.any() or continues.mean() > 0.5:
        return SessionSample(kept.table, share)
    return SessionSample(kept.table.filter(pa.array(~continues)), share)


def _in_training(samples: pa.Table, data: DataConfig) -> NDArray[np.bool_]:
    """Return which samples will be trained on."""
    if data.split.evaluation_from is None:
        return np.ones(samples.num_rows, bool)
    first = microseconds(data.split.evaluation_from)
    earlier = pc.less(samples[data.session.time].cast(pa.int64()), first)
    return one_chunk(earlier).to_numpy(zero_copy_only=False)


def _rows_looked_up(
    context: BuildContext, index: int, samples: list[pa.Table]
) -> Iterator[pa.Table]:
    """Yield the rows of a side table that have a key of the samples."""
    join = context.data.samples.joins[index]
    config, kind = context.data.sides[join.side], context.key_types[join.side]
    keys = [key_column(table, join.key or config.key, kind) for table in samples]
    wanted = pc.unique(pa.chunked_array(keys, kind)).drop_null()
    collected = OutputCollector(keep=False)
    for _, table in read_all(context, collected, {join.side}):
        for rows in collected.samples(good_side_rows(context, join.side, table)):
            yield rows.filter(pc.is_in(key_column(rows, config.key, kind), value_set=wanted))


def _parts(context: BuildContext, source: str) -> Iterator[tuple[FilePart, int]]:
    """Yield every part of a source's readable files with its bytes, in the listing's order."""
    for file in context.files():
        if file.source == source:
            parts = list(OutputCollector(keep=False).samples(cut_file(context, file)))
            for part in parts:
                yield part, max(1, (file.num_bytes or 0) // len(parts))


def _tables(context: BuildContext, part: FilePart) -> Iterator[pa.Table]:
    """Yield the rows of a part that can be read."""
    return OutputCollector(keep=False).samples(read_rows(context, part))


def _first_rows(context: BuildContext, edge: list[NDArray[np.int64]]) -> Iterator[SourceRows]:
    """Yield the first rows of each source: of all sources the same share, `INPUT_BYTES` in all.

    Args:
        context: of the build.
        edge: the origins of the last rows that are read of a log that has more are added to it.
    """
    parts = {name: list(_parts(context, name)) for name in context.data.sources}
    sizes = {name: sum(size for _, size in listed) for name, listed in parts.items()}
    share = INPUT_BYTES / max(1, sum(sizes.values()))
    for source, listed in parts.items():
        limit, read_bytes = share * sizes[source], 0
        for part, size in listed:
            if read_bytes >= limit:
                break
            read_bytes += size
            for table in _tables(context, part):
                if share < 1 and read_bytes > limit - limit // _EDGE:
                    edge.append(table[ORIGIN].to_numpy())
                yield source, table


def _rows_of_keys(context: BuildContext) -> Iterator[SourceRows]:
    """Yield the rows of some keys in all sources."""
    chosen, parts = choose_keys(_key_index(context), context.data.sample_source)
    for part in parts:
        for table in _tables(context, part):
            keys = _hashed_keys(context, table)
            yield part.source, table.filter(pa.array(np.isin(keys, chosen)))


@dataclass(frozen=True, slots=True)
class KeysOfPart:
    """The keys below some hash that a part of a file holds.

    Attributes:
        part: where.
        num_bytes: to read it.
        hashes: ascending hashes of its keys.
        counts: rows of each.
    """

    part: FilePart
    num_bytes: int
    hashes: NDArray[np.uint64]
    counts: NDArray[np.int64]


def _key_index(context: BuildContext) -> list[KeysOfPart]:
    """Return which part holds which keys, those of a share of hashes when the input is large."""
    parts = [pair for name in context.data.sources for pair in _parts(context, name)]
    share = min(1.0, 4 * INPUT_BYTES / max(1, sum(size for _, size in parts)))
    bound = np.uint64(min(2**64 - 1, int(share * 2**64)))
    index: list[KeysOfPart] = []
    for part, size in parts:
        hashes = [_hashed_keys(context, table) for table in _key_tables(context, part)]
        below = np.concatenate([h[h <= bound] for h in hashes] or [np.empty(0, np.uint64)])
        unique, counts = np.unique(below, return_counts=True)
        index.append(KeysOfPart(part, size, unique, counts))
    return index


def _hashed_keys(context: BuildContext, table: pa.Table) -> NDArray[np.uint64]:
    """Return the hash of each row's key; a null has that of the value that fills its place."""
    assert context.shard is not None, "only jobs with samples.per have keys"
    kind = key_type({n: context.empty_rows[n] for n in context.data.sources}, context.shard)
    return key_hashes(key_column(table, context.shard, kind))


def _key_tables(context: BuildContext, part: FilePart) -> Iterator[pa.Table]:
    """Yield the rows of a part; of Parquet only the key is read."""
    config, schema = context.data.sources[part.source], context.empty_rows[part.source].schema
    key = context.shard or ""
    if config.format == "parquet":
        schema = pa.schema([schema.field(key), schema.field(ORIGIN)])
        if config.columns:
            config = replace(config, columns={n: w for n, w in config.columns.items() if n == key})
    for rows in read_part(context.folder, part, config, schema):
        if rows.table is not None and rows.table.num_rows:
            yield rows.table


def choose_keys(
    index: list[KeysOfPart], source: str, max_bytes: int = INPUT_BYTES, max_rows: int = MAX_RAW_ROWS
) -> tuple[NDArray[np.uint64], list[FilePart]]:
    """Choose keys in the order of their hashes whose parts are read for at most some bytes.

    Args:
        index: keys of all parts of all sources.
        source: the source whose keys have samples.
        max_bytes: bytes of all parts with one of the keys, but for the first key's.
        max_rows: rows of all keys, but for the first key's.

    Returns:
        Hashes of the chosen keys, ascending, and the parts that hold their rows.
    """
    with_samples = [k.hashes for k in index if k.part.source == source]
    candidates = np.unique(np.concatenate(with_samples or [np.empty(0, np.uint64)]))
    places: dict[int, list[int]] = {int(h): [] for h in candidates}
    rows = dict.fromkeys(places, 0)
    for number, keys in enumerate(index):
        for hashed, count in zip(keys.hashes.tolist(), keys.counts.tolist(), strict=True):
            if hashed in places:
                places[hashed].append(number)
                rows[hashed] += count
    touched: set[int] = set()
    chosen: list[int] = []
    num_bytes = num_rows = 0
    for hashed, numbers in places.items():
        more = sum(index[n].num_bytes for n in numbers if n not in touched)
        fits = num_bytes + more <= max_bytes and num_rows + rows[hashed] <= max_rows
        if fits or not chosen:
            chosen.append(hashed)
            touched.update(numbers)
            num_bytes, num_rows = num_bytes + more, num_rows + rows[hashed]
    return np.array(chosen, np.uint64), [index[n].part for n in sorted(touched)]


# A job with `groups: auto` made into one that names its groups, in its own words.
#
# The dataset holds the job file with the chosen groups in the place of `auto`, so that no reader
# has to know of the choice; a build into a dataset that exists takes them from there.

PER_SAMPLE_ROLES = ("label", "weight", "label_time")
"""What is learned, and how much it counts, is said of each sample and read from there."""

_PLAIN = re.compile(r"(?!(?:true|false|null|yes|no|on|off|y|n)$)[A-Za-z_][A-Za-z0-9_]*", re.I)


def with_groups(request: BuildRequest, job: Job, features: FeatureSet) -> tuple[BuildRequest, Job]:
    """Return the request and the job with groups that have names.

    Args:
        request: what is to be built.
        job: the job file, as parsed.
        features: declared columns.

    Raises:
        SchemaError: the job does not fit its input, or nothing is there to choose from.
    """
    if not job.data.has_auto_groups:
        return request, job
    text = request.job_path.read_text(encoding="utf-8")
    if (request.dataset / MANIFEST).exists():
        path = verify_file(request.dataset / JOB, read_dataset(request.dataset).job_sha256)
        pinned = load_job(path)
        named = named_groups(job, pinned.data.groups)
        same = path.read_bytes() if named == pinned else None
        return replace(request, job_bytes=same or _bytes(text, named, {})), named
    ungrouped = replace(job, data=replace(job.data, groups={}))
    prepared = prepare(request, ungrouped, features)
    with TemporaryDirectory(prefix="presage-") as scratch, counting(Path(scratch)):
        context = build_context(request, ungrouped, features, prepared, Path(scratch))
        sample = sample_sessions(context)
        counts = counted_rows(Path(scratch))
    if sample is None:
        where = "name the groups, or see split.evaluation_from and the rows themselves"
        if counts.rejected:
            where = f"{counts}; correct the job or the rows"
        raise SchemaError(
            f"groups: auto must see samples of the training range, got none; {where}",
            file=str(request.job_path),
        )
    size = sum(f.num_bytes for f in prepared.listing)
    fixed = BYTES_PER_GROUP * sample.share * count_parts(size)
    choice = choose_from(sample.rows, ungrouped.data, features, fixed)
    for line in explained(choice):
        request.progress(line)
    named = named_groups(job, choice.mapping())
    reasons = {g.name: reason(g) for g in choice.groups}
    found = _bytes(text, named, reasons)
    return replace(request, listing=prepared.listing, job_bytes=found), named


def _bytes(text: str, job: Job, reasons: Mapping[str, str]) -> bytes:
    return rewritten(text, job.data, reasons).encode()


def choose_from(
    rows: pa.Table, data: DataConfig, features: FeatureSet, bytes_per_group: float
) -> GroupChoice:
    """Choose groups.

    Args:
        rows: samples of whole sessions, with origins and list indices.
        data: the job's data section; its groups mean nothing.
        features: declared columns.
        bytes_per_group: fixed cost of a group, for that many samples.
    """
    clustered = cluster(separate(rows, {}), data)
    samples = clustered.samples.samples
    block = np.arange(samples.num_rows) // data.block_samples  # windows of a sample are short
    transforms = data.transforms.get(SAMPLES, {})
    num_made = Counter[str]()
    for transform in transforms.values():
        inputs = original_inputs(transform, transforms)
        num_made.update({name: 1 / len(inputs) for name in inputs})
    known = [
        feature_of(f.name, f.role, samples[f.name], num_made[f.name])
        for f in features.features
        if f.name in samples.column_names and f.role not in PER_SAMPLE_ROLES
    ]
    costs = Costs(block, [f for f in known if f is not None], bytes_per_group)
    together = read_together(transforms)
    return choose_groups(costs, clustered.starts_session, together)


def explained(choice: GroupChoice) -> Iterator[str]:
    """Yield what was chosen and why, one line each."""
    yield (
        f"groups: auto looked at {choice.num_samples} samples of {choice.num_sessions} sessions "
        "and chose"
    )
    for group in choice.groups:
        yield f"  {group.name}: {', '.join(group.features)}; {reason(group)}"
    grouped = {f for g in choice.groups for f in g.features}
    alone = [
        f"{name} ({100 * r.change_rate:.0f} %)"
        for name, r in choice.features.items()
        if name not in grouped
    ]
    if alone:
        yield f"  in samples, with how often they change: {', '.join(alone)}"


def reason(group: ChosenGroup) -> str:
    """Return why a group is one."""
    r = group.repetition
    return (
        f"changes in {100 * r.change_rate:.1f} % of the samples of a session, "
        f"{r.dedup_factor:.2f} samples share a tuple, saves about {group.saved:.2f} B a sample in "
        "storage and reading"
    )


def named_groups(job: Job, groups: Mapping[str, tuple[str, ...]]) -> Job:
    """Return a job with these groups, each transform where all of its inputs are."""
    made = job.data.transforms.get(SAMPLES, {})
    grouped = {c for columns in groups.values() for c in columns}
    placed: dict[str, dict[str, str | TransformConfig]] = {}
    for name, transform in made.items():
        every = original_inputs(transform, made)
        homes = [g for g, columns in groups.items() if every & grouped and every <= {*columns}]
        placed.setdefault(homes[0] if homes else SAMPLES, {})[name] = transform
    return replace(job, data=replace(job.data, groups=dict(groups), transforms=placed))


def read_together(made: Mapping[str, str | TransformConfig]) -> list[frozenset[str]]:
    """Return the sets of columns that have to lie in one place, because a transform reads them.

    Example:
        >>> [sorted(s) for s in read_together({"x": "a + b", "y": "x + c", "z": "ln(d)"})]
        [['a', 'b', 'c']]
    """
    sets: list[frozenset[str]] = []
    for transform in made.values():
        joined = frozenset(original_inputs(transform, made))
        apart = [s for s in sets if not s & joined]
        sets = [*apart, joined.union(*(s for s in sets if s & joined))]
    return [s for s in sets if len(s) > 1]


def original_inputs(
    transform: str | TransformConfig, made: Mapping[str, str | TransformConfig]
) -> set[str]:
    """Return the columns of the samples that a transform reads, also through other transforms."""
    found: set[str] = set()
    seen: set[str] = set()
    waiting = [transform]
    while waiting:
        for name in inputs_of(waiting.pop()) - seen:
            seen.add(name)
            if name in made:
                waiting.append(made[name])
            else:
                found.add(name)
    return found


def rewritten(text: str, data: DataConfig, reasons: Mapping[str, str]) -> str:
    """Return a job file's text with its groups and transforms replaced, the rest as it was.

    Args:
        text: YAML with `data.groups`.
        data: what the groups and transforms shall be.
        reasons: group to a comment, where there is one.
    """
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    section = _value(root, "data")
    assert isinstance(section, yaml.MappingNode), "a job that was read has a data section"
    groups = {name: _flow(columns) for name, columns in data.groups.items()}
    transforms = {name: _flow(made) for name, made in data.transforms.items()}
    edits = [
        (node, _mapping(section, node, groups, reasons)) for node in [_value(section, "groups")]
    ]
    if data.transforms:
        node = _value(section, "transforms")
        edits.append((node, _mapping(section, node, transforms, {})))
    for node, new in sorted(edits, key=lambda e: e[0].start_mark.index, reverse=True):
        text = text[: node.start_mark.index].rstrip(" \n") + new + text[_end(node) :]
    return text


def _value(node: yaml.Node, key: str) -> yaml.Node:
    return next(value for name, value in node.value if name.value == key)


def _end(node: yaml.Node) -> int:
    """Return where the text of a node ends, without the lines and comments after it."""
    if isinstance(node, yaml.CollectionNode) and not node.flow_style and node.value:
        last = node.value[-1]
        return _end(last[1] if isinstance(last, tuple) else last)
    return node.end_mark.index


def _mapping(
    section: yaml.MappingNode,
    node: yaml.Node,
    lines: Mapping[str, str],
    comments: Mapping[str, str],
) -> str:
    """Return a mapping as YAML: one key a line, or in braces where the section is."""
    if section.flow_style or not lines:
        return " {" + ", ".join(f"{_word(k)}: {v}" for k, v in lines.items()) + "}"
    indent = " " * (section.value[0][0].start_mark.column + 2)
    return "".join(
        f"\n{indent}{_word(name)}: {value}" + (f"  # {comments[name]}" if name in comments else "")
        for name, value in lines.items()
    )


def _flow(value: tuple[str, ...] | Mapping[str, str | TransformConfig]) -> str:
    if isinstance(value, Mapping):
        made = {k: v if isinstance(v, str) else v.to_mapping() for k, v in value.items()}
        return "{" + ", ".join(f"{_word(k)}: {json.dumps(v)}" for k, v in made.items()) + "}"
    return "[" + ", ".join(map(_word, value)) + "]"


def _word(text: str) -> str:
    return text if _PLAIN.fullmatch(text) else json.dumps(text)
