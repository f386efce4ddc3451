"""Replace `groups: auto` in a job by named groups, chosen on a sample of whole sessions.

The dataset's job file has the chosen groups instead of `auto`, so no reader depends on the choice;
a build into an existing dataset takes its groups.

The sample consists of the sessions of the training range with the smallest hashes of their keys, as
many as fit, so it depends on the log only. The same hash places sessions in the dataset: the sample
is what the first blocks of the build hold. Samples are made by the local executor of builds, so the
event join, SQL per key, SQL per row, look-ups and sampling apply as in the build.

Input bytes are bounded. Without `samples.per`, the beginning of each source is read, `INPUT_BYTES`
in all; sessions that may continue after it are left out if enough others remain. With
`samples.per`, the key columns of all files are read, then all rows of some keys, chosen by hash,
from row groups of at most `INPUT_BYTES`. Side tables are read whole.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from tempfile import TemporaryDirectory

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import yaml
from numpy.typing import NDArray

from presage.pipelines import executor, stages
from presage.pipelines.autogroup.costs import BYTES_PER_GROUP, Costs, feature_of
from presage.pipelines.autogroup.search import ChosenGroup, GroupChoice, choose_groups
from presage.pipelines.clustering.star import cluster
from presage.pipelines.exchange import Counts, ReadElements, TaskResult, Worker
from presage.pipelines.prepare import BuildRequest, count_parts, holds_in_memory, prepare
from presage.pipelines.runner_options import LocalOptions
from presage.pipelines.samples.lookups import key_column, key_hashes, key_type
from presage.pipelines.samples.tuples import hash_session_keys, separate_tuples
from presage.pipelines.sources.formats import format_of, read_split
from presage.pipelines.sources.raw_rows import ORIGIN, InputSplit, microseconds
from presage.pipelines.stages import BuildContext
from presage.pipelines.table.target import JobFiles
from presage.pipelines.transforms.apply import inputs_of
from presage.schemas.arrays import is_list, one_chunk
from presage.schemas.config.job import SAMPLES, DataConfig, Job, parse_job
from presage.schemas.config.transforms import TransformConfig
from presage.schemas.dataset.manifest import find_root
from presage.schemas.dataset.opened import read_version
from presage.schemas.errors import SchemaError
from presage.schemas.features import FeatureSet
from presage.schemas.layout import JOB
from presage.schemas.storage.location import Location

INPUT_BYTES = 256 << 20
"""Maximum bytes of input files to read, except for key columns and if one key has more."""
MAX_CELLS = 1 << 21
"""Maximum number of values in the sample, with list values: some 15,000 samples of the demo."""
MAX_RAW_ROWS = 1 << 18
"""Maximum number of raw rows for `samples.per`, unless one key has more."""
_OPEN_SHARE = 1 / 8
"""If a log is not read to its end, sessions with a sample in this last share of what is read may
continue after it."""
PER_SAMPLE_ROLES = ("label", "weight", "label_time")
"""Roles of features that stay with the samples: the trainer reads them there."""


def with_groups(request: BuildRequest, job: JobFiles) -> tuple[BuildRequest, JobFiles]:
    """Return the request, with its listing if files were read, and the job with named groups.

    Raises:
        SchemaError: the job does not match its input, or there are no samples to choose from.
    """
    if not job.config.data.has_auto_groups:
        return request, job
    dataset = request.target.dataset
    root = find_root(dataset)
    if root is not None:
        job_bytes = read_version(dataset, JOB, root.manifest.job_sha256)
        existing = parse_job(job_bytes.decode(), str(dataset / JOB))
        named = named_groups(job.config, existing.data.groups)
        if named != existing:
            job_bytes = rewritten(job.job_bytes.decode(), named.data, {}).encode()
        return request, replace(job, config=named, job_bytes=job_bytes)
    context = prepare(request, without_groups(job))
    job = with_chosen_groups(job, context, request.options.progress)
    return replace(request, input=replace(request.input, listing=context.listing)), job


def without_groups(job: JobFiles) -> JobFiles:
    """Return a job that stores all columns with the samples."""
    data = replace(job.config.data, groups={})
    return replace(job, config=replace(job.config, data=data))


def with_chosen_groups(
    job: JobFiles, context: BuildContext, progress: Callable[[str], None]
) -> JobFiles:
    """Return a job with groups that are chosen on a sample of its input.

    `context` is that of a build of the job without groups.

    Raises:
        SchemaError: there are no samples to choose from.
    """
    with TemporaryDirectory(prefix="presage-") as scratch:
        sample, counts = sample_sessions(replace(context, segment_root=Location.parse(scratch)))
    if sample is None:
        advice = "name the groups, or check split.evaluation_from and the rows"
        if counts.rejected:
            advice = f"{counts}; correct the job or the rows"
        raise SchemaError(
            f"groups: auto found no samples in the training range; {advice}",
            file=str(job.path),
        )
    size = sum(f.num_bytes for f in context.listing)
    bytes_per_group = BYTES_PER_GROUP * sample.share * count_parts(size)
    choice = choose_from(sample.rows, context.data, job.features, bytes_per_group)
    for line in explained(choice):
        progress(line)
    named = named_groups(job.config, choice.mapping())
    reasons = {g.name: reason(g) for g in choice.groups}
    job_bytes = rewritten(job.job_bytes.decode(), named.data, reasons).encode()
    return replace(job, config=named, job_bytes=job_bytes)


# Sample whole sessions.


@dataclass(slots=True)
class SmallestHashes:
    """The rows with the smallest hashes, all rows of a hash or none, as many as fit.

    The result depends on the set of rows added, not on their order.

    Attributes:
        max_cells: maximum number of values; if the smallest hash alone has more, its rows with the
            smallest origins are kept.
        bound: rows with larger hashes are dropped.
    """

    max_cells: int
    bound: int = (1 << 64) - 1
    table: pa.Table | None = None
    hashes: NDArray[np.uint64] = field(default_factory=lambda: np.empty(0, np.uint64))

    def add(self, table: pa.Table, hashes: NDArray[np.uint64]) -> None:
        """Add rows; drop the rows of the largest hashes if they do not fit."""
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
    """Return the number of values of each row."""
    cells = np.full(table.num_rows, table.num_columns, np.int64)
    for name in table.column_names:
        if is_list(table.schema.field(name).type):
            lengths = pc.fill_null(pc.list_value_length(table[name]), 0)
            cells += one_chunk(lengths).to_numpy().astype(np.int64)
    return cells


@dataclass(frozen=True, slots=True)
class SessionSample:
    """Samples of whole sessions.

    `rows` have origins and list indices; `share` is the estimated share of all sessions.
    """

    rows: pa.Table
    share: float


def sample_sessions(context: BuildContext) -> tuple[SessionSample | None, Counts]:
    """Return samples of whole sessions of the training range, None without any, and counts.

    `context` is that of a build without groups.
    """
    data = context.data
    num_parts = min(context.num_parts, count_parts(INPUT_BYTES))
    context = replace(context, num_parts=num_parts)
    kept = SmallestHashes(MAX_CELLS)
    edge: list[NDArray[np.int64]] = [np.empty(0, np.int64)]
    edge_keys: list[NDArray[np.uint64]] = []
    total = sum(f.num_bytes for f in context.listing if f.source in data.sources)
    side_bytes = sum(f.num_bytes for f in context.listing) - total
    in_memory = holds_in_memory(LocalOptions(), min(total, INPUT_BYTES) + side_bytes)
    with executor.open_exchange(context, 0, in_memory) as exchange:
        splits = executor.list_splits(context, exchange)
        sides = executor.bundles_of((s for s in splits if s[0].source in data.sides), exchange)
        sources = {name: [s for s in splits if s[0].source == name] for name in data.sources}
        choose = _first_splits if data.samples.per is None else _splits_of_keys
        executor.make_samples(context, exchange, choose(context, sources), sides, map_chosen_rows)
        for sent in exchange.take(_EDGE_ROWS).values():
            edge += [table[ORIGIN].to_numpy() for table in ReadElements(sent)]
        for sent in exchange.take(stages.SAMPLES).values():
            for tuples in ReadElements(sent):
                good = tuples.samples.filter(pa.array(_in_training(tuples.samples, data)))
                if good.num_rows:
                    hashes = hash_session_keys(good[data.session.key])
                    is_edge = np.isin(good[ORIGIN].to_numpy(), np.concatenate(edge))
                    edge_keys.append(np.unique(hashes[is_edge]))
                    kept.add(good, hashes)
    counts = exchange.progress.counts
    if kept.table is None:
        return None, counts
    share = min(1.0, INPUT_BYTES / max(1, total)) * (kept.bound + 1) / 2**64
    may_continue = np.isin(kept.hashes, np.concatenate(edge_keys))
    if not may_continue.any() or may_continue.mean() > 0.5:
        return SessionSample(kept.table, share), counts
    return SessionSample(kept.table.filter(pa.array(~may_continue)), share), counts


def _in_training(samples: pa.Table, data: DataConfig) -> NDArray[np.bool_]:
    """Return which samples are in the training range."""
    if data.split.evaluation_from is None:
        return np.ones(samples.num_rows, bool)
    first = microseconds(data.split.evaluation_from)
    earlier = pc.less(samples[data.session.time].cast(pa.int64()), first)
    return one_chunk(earlier).to_numpy(zero_copy_only=False)


_EDGE_ROWS = "edge"

Splits = Mapping[str, Sequence[tuple[InputSplit, int]]]
"""(split, bytes) of each source, in the order of the listing."""


@dataclass(frozen=True, slots=True)
class ChosenRows:
    """Rows to make samples of.

    Those with the hashes `keys`, all when None; their origins are sent as well if `is_edge`, see
    `_OPEN_SHARE`.
    """

    split: InputSplit
    keys: NDArray[np.uint64] | None = None
    is_edge: bool = False


def map_chosen_rows(
    worker: Worker, chosen: ChosenRows, side_tables: executor.SidePaths
) -> TaskResult:
    """Send the samples of chosen rows."""
    outputs = executor.TaskOutputs(worker, side_tables)
    context, source = worker.context, chosen.split.source
    for table in outputs.read(chosen.split):
        if chosen.is_edge:
            outputs.send(_EDGE_ROWS, 0, table.select([ORIGIN]))
        if chosen.keys is not None:
            is_chosen = np.isin(_hashed_keys(context, table), chosen.keys)
            table = table.filter(pa.array(is_chosen))
        outputs.add_rows(source, table)
    return outputs.result()


def _first_splits(_: BuildContext, splits: Splits) -> Iterator[ChosenRows]:
    """Yield the first rows of each source: the same share of each, `INPUT_BYTES` in all."""
    sizes = {name: sum(size for _, size in listed) for name, listed in splits.items()}
    share = INPUT_BYTES / max(1, sum(sizes.values()))
    for source, listed in splits.items():
        limit, read_bytes = share * sizes[source], 0
        for split, size in listed:
            if read_bytes >= limit:
                break
            read_bytes += size
            yield ChosenRows(split, is_edge=share < 1 and read_bytes > limit * (1 - _OPEN_SHARE))


def _splits_of_keys(context: BuildContext, splits: Splits) -> Iterator[ChosenRows]:
    """Yield all rows of some keys, from all sources."""
    chosen, with_keys = choose_keys(_key_index(context, splits), context.data.sample_source)
    for split in with_keys:
        yield ChosenRows(split, chosen)


@dataclass(frozen=True, slots=True)
class KeysOfSplit:
    """The keys of an input split, below some hash.

    `hashes` are those of the keys, ascending, `counts` the rows of each key.
    """

    split: InputSplit
    num_bytes: int
    hashes: NDArray[np.uint64]
    counts: NDArray[np.int64]


def _key_index(context: BuildContext, of_source: Splits) -> list[KeysOfSplit]:
    """Return the keys of each split; if the input is large, those of a share of the hashes."""
    splits = [pair for listed in of_source.values() for pair in listed]
    share = min(1.0, 4 * INPUT_BYTES / max(1, sum(size for _, size in splits)))
    bound = np.uint64(min(2**64 - 1, int(share * 2**64)))
    index: list[KeysOfSplit] = []
    for split, size in splits:
        hashes = [_hashed_keys(context, table) for table in _key_tables(context, split)]
        below = np.concatenate([h[h <= bound] for h in hashes] or [np.empty(0, np.uint64)])
        unique, counts = np.unique(below, return_counts=True)
        index.append(KeysOfSplit(split, size, unique, counts))
    return index


def _hashed_keys(context: BuildContext, table: pa.Table) -> NDArray[np.uint64]:
    """Return the hash of each row's key; a null hashes as the value that replaces it."""
    assert context.shard is not None, "only jobs with samples.per have keys"
    kind = key_type({n: context.empty_rows[n] for n in context.data.sources}, context.shard)
    return key_hashes(key_column(table, context.shard, kind))


def _key_tables(context: BuildContext, split: InputSplit) -> Iterator[pa.Table]:
    """Yield the rows of a split; of a columnar format, only the key column."""
    config, schema = context.data.sources[split.source], context.empty_rows[split.source].schema
    key = context.shard or ""
    if format_of(config).is_columnar:
        schema = pa.schema([schema.field(key), schema.field(ORIGIN)])
        if config.columns:
            config = replace(config, columns={n: w for n, w in config.columns.items() if n == key})
    for rows in read_split(context.folder, split, config, schema):
        if rows.table is not None and rows.table.num_rows:
            yield rows.table


def choose_keys(
    index: list[KeysOfSplit],
    source: str,
    max_bytes: int = INPUT_BYTES,
    max_rows: int = MAX_RAW_ROWS,
) -> tuple[NDArray[np.uint64], list[InputSplit]]:
    """Choose keys in the order of their hashes, within limits of bytes and rows to read.

    `source` is the one whose keys have samples. The first key may exceed the limits.

    Returns:
        Hashes of the chosen keys, ascending, and the splits that hold their rows.
    """
    with_samples = [k.hashes for k in index if k.split.source == source]
    candidates = np.unique(np.concatenate(with_samples or [np.empty(0, np.uint64)]))
    splits_of_key: dict[int, list[int]] = {int(h): [] for h in candidates}
    rows = dict.fromkeys(splits_of_key, 0)
    for number, keys in enumerate(index):
        for key, count in zip(keys.hashes.tolist(), keys.counts.tolist(), strict=True):
            if key in splits_of_key:
                splits_of_key[key].append(number)
                rows[key] += count
    splits: set[int] = set()
    chosen: list[int] = []
    num_bytes = num_rows = 0
    for key, numbers in splits_of_key.items():
        more_bytes = sum(index[n].num_bytes for n in numbers if n not in splits)
        fits = num_bytes + more_bytes <= max_bytes and num_rows + rows[key] <= max_rows
        if fits or not chosen:
            chosen.append(key)
            splits.update(numbers)
            num_bytes, num_rows = num_bytes + more_bytes, num_rows + rows[key]
    return np.array(chosen, np.uint64), [index[n].split for n in sorted(splits)]


# Choose groups, and write them into the job.

_PLAIN = re.compile(r"(?!(?:true|false|null|yes|no|on|off|y|n)$)[A-Za-z_][A-Za-z0-9_]*", re.I)


def choose_from(
    rows: pa.Table, data: DataConfig, features: FeatureSet, bytes_per_group: float
) -> GroupChoice:
    """Choose groups.

    `rows` have origins and list indices; the groups of `data` are ignored; `bytes_per_group` is the
    fixed cost of a group for the number of rows.
    """
    clustered = cluster(separate_tuples(rows, {}), data)
    samples = clustered.samples.samples
    block = np.arange(samples.num_rows) // data.block_samples  # ignores cuts between windows
    transforms = data.transforms.get(SAMPLES, {})
    num_made = Counter[str]()
    for transform in transforms.values():
        inputs = original_inputs(transform, transforms)
        num_made.update({name: 1 / len(inputs) for name in inputs})
    present = set(samples.column_names)
    candidates = [
        feature_of(f.name, f.role, samples[f.name], num_made[f.name])
        for f in features.features
        if f.name in present and f.role not in PER_SAMPLE_ROLES
    ]
    costs = Costs(block, [f for f in candidates if f is not None], bytes_per_group)
    return choose_groups(costs, clustered.starts_session, read_together(transforms))


def explained(choice: GroupChoice) -> Iterator[str]:
    """Yield the choice and its reasons as lines."""
    yield (
        f"groups: auto: chosen from {choice.num_samples} samples of {choice.num_sessions} sessions:"
    )
    for group in choice.groups:
        yield f"  {group.name}: {', '.join(group.features)}; {reason(group)}"
    grouped = {f for g in choice.groups for f in g.features}
    ungrouped = [
        f"{name} ({100 * r.change_rate:.0f} %)"
        for name, r in choice.features.items()
        if name not in grouped
    ]
    if ungrouped:
        yield f"  with the samples (change rate): {', '.join(ungrouped)}"


def reason(group: ChosenGroup) -> str:
    """Return the figures that justify a group."""
    r = group.repetition
    return (
        f"changes in {100 * r.change_rate:.1f} % of the samples of a session, "
        f"{r.dedup_factor:.2f} samples share a tuple, saves about {group.saved:.2f} B a sample in "
        "storage and reading"
    )


def named_groups(job: Job, groups: Mapping[str, tuple[str, ...]]) -> Job:
    """Return a job with these groups, each transform in the group that has all of its inputs."""
    declared = job.data.transforms.get(SAMPLES, {})
    transforms: dict[str, dict[str, str | TransformConfig]] = {}
    for name, transform in declared.items():
        inputs = original_inputs(transform, declared)
        owners = [g for g, columns in groups.items() if inputs and inputs <= {*columns}]
        transforms.setdefault(owners[0] if owners else SAMPLES, {})[name] = transform
    return replace(job, data=replace(job.data, groups=dict(groups), transforms=transforms))


def read_together(transforms: Mapping[str, str | TransformConfig]) -> list[frozenset[str]]:
    """Return the sets of columns that must not be split over groups: a transform reads them.

    Example:
        >>> [sorted(s) for s in read_together({"x": "a + b", "y": "x + c", "z": "ln(d)"})]
        [['a', 'b', 'c']]
    """
    sets: list[frozenset[str]] = []
    for transform in transforms.values():
        inputs = frozenset(original_inputs(transform, transforms))
        disjoint = [s for s in sets if not s & inputs]
        sets = [*disjoint, inputs.union(*(s for s in sets if s & inputs))]
    return [s for s in sets if len(s) > 1]


def original_inputs(
    transform: str | TransformConfig, transforms: Mapping[str, str | TransformConfig]
) -> set[str]:
    """Return the columns of the samples that a transform reads, also through other transforms."""
    originals: set[str] = set()
    visited: set[str] = set()
    pending = [transform]
    while pending:
        for name in inputs_of(pending.pop()) - visited:
            visited.add(name)
            if name in transforms:
                pending.append(transforms[name])
            else:
                originals.add(name)
    return originals


def rewritten(text: str, data: DataConfig, reasons: Mapping[str, str]) -> str:
    """Return a job file's text with its groups and transforms replaced, the rest unchanged.

    `reasons` has the comments of groups.
    """
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    section = _value(root, "data")
    assert isinstance(section, yaml.MappingNode), "a job that was read has a data section"
    groups = {name: _flow(columns) for name, columns in data.groups.items()}
    transforms = {name: _flow(made) for name, made in data.transforms.items()}
    node = _value(section, "groups")
    edits = [(node, _mapping(section, node, groups, reasons))]
    if data.transforms:
        node = _value(section, "transforms")
        edits.append((node, _mapping(section, node, transforms, {})))
    for node, new in sorted(edits, key=lambda e: e[0].start_mark.index, reverse=True):
        text = text[: node.start_mark.index].rstrip(" \n") + new + text[_end(node) :]
    return text


def _value(node: yaml.Node, key: str) -> yaml.Node:
    return next(value for name, value in node.value if name.value == key)


def _end(node: yaml.Node) -> int:
    """Return the index of the end of a node's text, without following lines and comments."""
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
    """Return a mapping as YAML: one key per line, or in braces if the section is."""
    if section.flow_style or not lines:
        return " {" + ", ".join(f"{yaml_word(k)}: {v}" for k, v in lines.items()) + "}"
    indent = " " * (section.value[0][0].start_mark.column + 2)
    return "".join(
        f"\n{indent}{yaml_word(name)}: {value}"
        + (f"  # {comments[name]}" if name in comments else "")
        for name, value in lines.items()
    )


def _flow(value: tuple[str, ...] | Mapping[str, str | TransformConfig]) -> str:
    if not isinstance(value, Mapping):
        return "[" + ", ".join(map(yaml_word, value)) + "]"
    transforms = {k: v if isinstance(v, str) else v.to_mapping() for k, v in value.items()}
    return "{" + ", ".join(f"{yaml_word(k)}: {json.dumps(v)}" for k, v in transforms.items()) + "}"


def yaml_word(text: str) -> str:
    """Return a text as a YAML scalar: plain if it is a name and no keyword, else in quotes."""
    return text if _PLAIN.fullmatch(text) else json.dumps(text)
