"""A job with `groups: auto` made into one that names its groups, in its own words.

The dataset holds the job file with the chosen groups in the place of `auto`, so that no reader has
to know of the choice; a build into a dataset that exists takes them from there.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pyarrow as pa
import yaml

from pipelines.groups.costs import BYTES_PER_GROUP, Costs, feature_of
from pipelines.groups.sample import sample_sessions
from pipelines.groups.search import ChosenGroup, GroupChoice, choose_groups
from pipelines.learned.inputs import inputs_of
from pipelines.parts.cluster import cluster
from pipelines.prepare import BuildRequest, context_of, num_parts_of, prepare
from pipelines.progress import counted_rows, counting
from pipelines.samples.tuples import separate
from schemas.dataset import verified
from schemas.errors import SchemaError
from schemas.features import FeatureSet
from schemas.job import SAMPLES, DataConfig, Job, load_job
from schemas.job_transforms import TransformConfig
from schemas.layout import JOB, MANIFEST
from schemas.manifest import read_dataset

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
        path = verified(request.dataset / JOB, read_dataset(request.dataset).job_sha256)
        pinned = load_job(path)
        named = named_groups(job, pinned.data.groups)
        same = path.read_bytes() if named == pinned else None
        return replace(request, job_bytes=same or _bytes(text, named, {})), named
    ungrouped = replace(job, data=replace(job.data, groups={}))
    prepared = prepare(request, ungrouped, features)
    with TemporaryDirectory(prefix="presage-") as scratch, counting(Path(scratch)):
        context = context_of(request, ungrouped, features, prepared, Path(scratch))
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
    fixed = BYTES_PER_GROUP * sample.share * num_parts_of(size)
    choice = choose_from(sample.rows, ungrouped.data, features, fixed)
    for line in explained(choice):
        request.say(line)
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
        made = {k: v if isinstance(v, str) else v.written() for k, v in value.items()}
        return "{" + ", ".join(f"{_word(k)}: {json.dumps(v)}" for k, v in made.items()) + "}"
    return "[" + ", ".join(map(_word, value)) + "]"


def _word(text: str) -> str:
    return text if _PLAIN.fullmatch(text) else json.dumps(text)
