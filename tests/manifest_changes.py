"""Changed values in JSON files of datasets and runs, with the checksums that a forger corrects."""

from __future__ import annotations

import copy
import hashlib
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from presage.schemas.dataset.manifest import hash_of
from presage.schemas.layout import MANIFEST, SEGMENTS

Key = tuple[str | int, ...]
"""Path of a value in a JSON document."""
VALUES: tuple[Any, ...] = (
    *(0, -1, 2**31, 2**40, 2**63, 2**64, -(2**63), 1e308, math.nan),
    *(None, "", [], {}, "x" * 100_000, "../x"),
)
"""Values that take the place of others."""
CHANGES = (*range(len(VALUES)), "duplicate", "swap", "drop")
"""Numbers of values, and changes of lists and mappings."""


def keys_of(body: Any, key: Key = ()) -> Iterator[Key]:
    """Yield the path of each value below a JSON document, its containers included."""
    items = body.items() if isinstance(body, dict) else enumerate(body)
    for name, value in items:
        yield (*key, name)
        if isinstance(value, dict | list):
            yield from keys_of(value, (*key, name))


def changed(body: Any, key: Key, change: int | str) -> Any:
    """Return a document with one value changed; the same one if the change needs a list."""
    body = copy.deepcopy(body)
    parent = body
    for name in key[:-1]:
        parent = parent[name]
    value, place = parent[key[-1]], key[-1]
    if isinstance(change, int):
        parent[place] = VALUES[change]
    elif change == "drop":
        del parent[place]
    elif isinstance(value, list) and value:
        parent[place] = [*value, value[0]] if change == "duplicate" else value[::-1]
    elif isinstance(value, dict) and len(value) > 1:
        names, values = list(value), list(value.values())
        moved = [values[0]] * len(values) if change == "duplicate" else values[::-1]
        parent[place] = dict(zip(names, moved, strict=True))
    return body


def write_checked(path: Path, body: Any) -> None:
    """Write a document; one with a checksum gets the right one, in the form of the file."""
    data = path.read_bytes()
    if "checksum" not in json.loads(data):
        path.unlink()
        path.write_text(json.dumps(body))
        return
    body = {k: v for k, v in body.items() if k != "checksum"}
    try:
        body["checksum"] = hash_of(body)
    except ValueError:  # NaN
        body["checksum"] = ""
    text = json.dumps(body, indent=1, sort_keys=True) + "\n"
    compact = json.dumps(body, separators=(",", ":"), sort_keys=True)
    path.unlink()  # hard links
    path.write_text(text if data.startswith(b"{\n") else compact)


def forge(dataset: Path, name: str, body: Any) -> None:
    """Write a document of a dataset, and correct the hashes of the documents that name it.

    Segments keep the order of their blocks.
    """
    write_checked(dataset / name, body)
    root_path = newest_root(dataset)
    if dataset / name == root_path:
        return
    root = json.loads(root_path.read_text())
    for segment in root["segments"]:
        path = dataset / SEGMENTS / (segment.get("path") or segment["id"]) / MANIFEST
        before, after = segment["manifest_sha256"], _sha256(path)
        segment.setdefault("shuffle_key", int.from_bytes(bytes.fromhex(before[:16]), "little"))
        segment["manifest_sha256"] = after
        for index in root["indexes"]:
            part = index["parts"][segment["id"]]
            path = dataset / index["id"] / (part.get("path") or part["id"]) / MANIFEST
            if before != after:
                of_part = json.loads(path.read_text())
                of_part["segment_sha256"] = after
                write_checked(path, of_part)
            part["manifest_sha256"] = _sha256(path)
    write_checked(root_path, root)


def newest_root(dataset: Path) -> Path:
    """Return the path of the newest root manifest."""
    return max((dataset / "_manifests").glob("*.json"))


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
