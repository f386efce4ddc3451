"""Invalid job files are refused in one line with file, line, key and fix."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import Literal

import pytest

from presage.schemas.config.parse import read_yaml
from presage.schemas.errors import SchemaError
from presage.schemas.typed_values import parse_duration, parse_size


@dataclass(frozen=True, slots=True, kw_only=True)
class Inner:
    """A nested section."""

    size: int = 1
    """Bytes."""
    kind: Literal["hash", "identity"] = "hash"
    """One of two."""

    def __post_init__(self) -> None:
        """Refuse a size that is not positive."""
        if self.size < 1:
            raise ValueError(f"size must be at least 1, got {self.size}; raise it")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outer:
    """Each kind of field once."""

    name: str
    """Required."""
    inner: Inner = field(default_factory=Inner)
    """Nested."""
    groups: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Mapping of lists."""
    rate: float = 0.5
    """Float."""
    flag: bool = False
    """Bool."""
    pause: timedelta | None = None
    """Optional."""
    start: datetime = datetime(2026, 1, 1)
    """Time."""
    inners: tuple[Inner, ...] = ()
    """List of sections."""


def read(tmp_path: Path, text: str | bytes) -> Outer:
    path = tmp_path / "job.yaml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return read_yaml(path, Outer)


VALUES = {
    "only what is required": ("name: a\n", Outer(name="a")),
    "a quoted number is a text": ('name: "7"\n', Outer(name="7")),
    "a size with a unit": (
        "{name: a, inner: {size: 2KiB}}",
        Outer(name="a", inner=Inner(size=2048)),
    ),
    "underscores in numbers": (
        "{name: a, inner: {size: 4_096}}",
        Outer(name="a", inner=Inner(size=4096)),
    ),
    "a mapping of lists": (
        "name: a\ngroups:\n  g: [x, y]\n  h: []\n",
        Outer(name="a", groups={"g": ("x", "y"), "h": ()}),
    ),
    "an exponent without a point": ("{name: a, rate: 1e-3}", Outer(name="a", rate=0.001)),
    "a whole number for a float": ("{name: a, rate: 2}", Outer(name="a", rate=2.0)),
    "a duration": ("{name: a, pause: 90s}", Outer(name="a", pause=timedelta(seconds=90))),
    "null for an optional": ("{name: a, pause: null}", Outer(name="a")),
    "a day": ("{name: a, start: 2026-03-01}", Outer(name="a", start=datetime(2026, 3, 1))),
    "a time with a zone": (
        "{name: a, start: 2026-03-01T02:00:00+02:00}",
        Outer(name="a", start=datetime(2026, 3, 1)),
    ),
    "a list of sections": (
        "{name: a, inners: [{size: 2}, {kind: identity}]}",
        Outer(name="a", inners=(Inner(size=2), Inner(kind="identity"))),
    ),
    "an anchor and an alias": (
        "{name: &n a, groups: {g: [*n]}}",
        Outer(name="a", groups={"g": ("a",)}),
    ),
}


@pytest.mark.parametrize(("text", "expected"), VALUES.values(), ids=VALUES.keys())
def test_read_yaml_fills_the_dataclass(tmp_path: Path, text: str, expected: Outer) -> None:
    found = read(tmp_path, text)
    assert found == expected
    assert type(found.rate) is float


# Sentence to file and message; @ stands for the path of the file.
ERRORS: dict[str, tuple[str | bytes, str]] = {
    "unknown key, near a known one": (
        "name: a\ngrops: {}\n",
        "unknown key: grops in @:2; did you mean 'groups'?",
    ),
    "unknown key, near none": (
        "name: a\ninner:\n  size: 2\n  zz: 1\n",
        "unknown key: inner.zz in @:4; use one of kind, size",
    ),
    "required key is missing": ("rate: 1.0\n", "missing key: name in @:1; add it"),
    "key twice": ("name: a\nrate: 1\nname: b\n", "duplicate key: name in @:3; keep one"),
    "key of a mapping twice": (
        "name: a\ngroups:\n  g: [x]\n  g: [y]\n",
        "duplicate key: groups.g in @:4; keep one",
    ),
    "key that is a list": (
        "name: a\n? [x, y]\n: 1\n",
        "key must be one word, got a list in @:2; check the braces",
    ),
    "text for a number": (
        "name: a\ninner:\n  size: many\n",
        "inner.size must be a whole number, got 'many' in @:3; "
        "write one, such as 1024, or a size, such as 64MiB",
    ),
    "float for a whole number": (
        "name: a\ninner: {size: 1.5}\n",
        "inner.size must be a whole number, got 1.5 in @:2; "
        "write one, such as 1024, or a size, such as 64MiB",
    ),
    "bool for a whole number": (
        "name: a\ninner: {size: true}\n",
        "inner.size must be a whole number, got True in @:2; "
        "write one, such as 1024, or a size, such as 64MiB",
    ),
    "null for a whole number": (
        "name: a\ninner: {size: null}\n",
        "inner.size must be a whole number, got None in @:2; "
        "write one, such as 1024, or a size, such as 64MiB",
    ),
    "text for a float": (
        "name: a\nrate: fast\n",
        "rate must be a finite number, got 'fast' in @:2; write one, such as 0.001",
    ),
    "not a number": (
        "name: a\nrate: .nan\n",
        "rate must be a finite number, got nan in @:2; write one, such as 0.001",
    ),
    "infinity": (
        "name: a\nrate: .inf\n",
        "rate must be a finite number, got inf in @:2; write one, such as 0.001",
    ),
    "number for a text": ("name: 7\n", "name must be a text, got 7 in @:1; put it in quotes"),
    "yes for a text": ("name: yes\n", "name must be a text, got True in @:1; put it in quotes"),
    "text for a bool": (
        "name: a\nflag: maybe\n",
        "flag must be true or false, got 'maybe' in @:2; write one of them",
    ),
    "duration without a unit": (
        "name: a\npause: 30\n",
        "pause must be a duration, got 30 in @:2; write 90s, 30m, 12h or 1d",
    ),
    "duration with an unknown unit": (
        "name: a\npause: 3y\n",
        "pause must be a duration, got '3y' in @:2; write 90s, 30m, 12h or 1d",
    ),
    "duration beyond all time": (
        "name: a\npause: 99999999999w\n",
        "pause must be a duration, got '99999999999w' in @:2; write 90s, 30m, 12h or 1d",
    ),
    "text for a time": (
        "name: a\nstart: soon\n",
        "start must be a time, got 'soon' in @:2; write 2026-01-31 or 2026-01-31T12:00:00",
    ),
    "day that does not exist": (
        "name: a\nstart: 2026-02-31\n",
        "start must be a plain value, got '2026-02-31' in @:2; quote it or correct it",
    ),
    "unknown tag": (
        "name: !thing a\n",
        "name must be a plain value, got 'a' in @:1; quote it or correct it",
    ),
    "word outside the choices, near one": (
        "name: a\ninner: {kind: identty}\n",
        "inner.kind must be one of hash, identity, got 'identty' in @:2; did you mean 'identity'?",
    ),
    "word outside the choices, near none": (
        "name: a\ninner: {kind: 3}\n",
        "inner.kind must be one of hash, identity, got 3 in @:2; use one of hash, identity",
    ),
    "one value for a list": (
        "name: a\ngroups: {g: x}\n",
        "groups.g must be a list, got 'x' in @:2; write [a, b]",
    ),
    "wrong entry of a list": (
        "name: a\ngroups:\n  g:\n  - x\n  - 5\n",
        "groups.g[1] must be a text, got 5 in @:5; put it in quotes",
    ),
    "list for a mapping": (
        "name: a\ngroups: [x]\n",
        "groups must be a mapping of keys, got a list in @:2; write key: value",
    ),
    "list for one value": (
        "name: [a]\n",
        "name must be one value, got a list in @:1; write name: value",
    ),
    "mapping for an optional value": (
        "name: a\npause: {s: 1}\n",
        "pause must be one value, got a mapping in @:2; write pause: value",
    ),
    "text for the whole file": (
        "hello\n",
        "value must be a mapping of keys, got 'hello' in @:1; write key: value",
    ),
    "check of the dataclass": (
        "name: a\ninner:\n  size: 0\n",
        "inner.size must be at least 1, got 0 in @:3; raise it",
    ),
    "check of a dataclass in a list": (
        "name: a\ninners:\n- size: 1\n- size: 0\n",
        "inners[1].size must be at least 1, got 0 in @:4; raise it",
    ),
    "no YAML": (
        "name: a\ngroups: [x\n",
        "job file is not YAML: did not find expected ',' or ']' in @:3; "
        "check indentation and quotes",
    ),
    "two documents": (
        "name: a\n---\nname: b\n",
        "job file is not YAML: but found another document in @:2; check indentation and quotes",
    ),
    "nothing": ("# only a comment\n", "job file is empty in @; start from a shipped one"),
    "control character": (
        "name: a\x07\n",
        "job file is not YAML: unacceptable character #x0007: control characters are not "
        "allowed in @; save it as plain text",
    ),
    "no UTF-8": (
        b"name: \xff\n",
        "job file cannot be read: 'utf-8' codec can't decode byte 0xff in position 6: "
        "invalid start byte in @; check the path",
    ),
}


@pytest.mark.parametrize(("text", "message"), ERRORS.values(), ids=ERRORS.keys())
def test_read_yaml_of_a_wrong_file_says_where_and_what_to_do(
    tmp_path: Path, text: str | bytes, message: str
) -> None:
    whole = message.replace("@", str(tmp_path / "job.yaml"))
    with pytest.raises(SchemaError, match=f"^{re.escape(whole)}$"):
        read(tmp_path, text)


def test_read_yaml_of_a_missing_file_names_it(tmp_path: Path) -> None:
    path = tmp_path / "none.yaml"
    message = f"there is no job file {path}; check the path"
    with pytest.raises(SchemaError, match=f"^{re.escape(message)}$"):
        read_yaml(path, Outer)


SIZES = {"0B": 0, "1.5KiB": 1536, "64MiB": 64 << 20, "2 GiB": 2 << 30}


def test_parse_size_is_exact() -> None:
    assert {text: parse_size(text) for text in SIZES} == SIZES
    assert parse_size("9007199254740993B") == (1 << 53) + 1  # beyond the 53 bits of a float
    message = "size must be a number and a unit, got '1GB'; write 64MiB or 2GiB"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        parse_size("1GB")


DURATIONS = {
    "5us": timedelta(microseconds=5),
    "250ms": timedelta(milliseconds=250),
    "90 s": timedelta(seconds=90),
    "1.5h": timedelta(minutes=90),
    "2d": timedelta(days=2),
    "1w": timedelta(weeks=1),
}


def test_parse_duration_knows_each_unit() -> None:
    assert {text: parse_duration(text) for text in DURATIONS} == DURATIONS
    message = "duration must be a number and a unit, got '-1s'; write 30m, 12h or 1d"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        parse_duration("-1s")


NESTED = {
    "flow": "name: " + "[" * 20_000 + "]" * 20_000,
    "flow, never closed": "name: " + "{a: " * 20_000,
    "blocks": "\n".join(f"{' ' * i}a:" for i in range(2_000)),
    "list items": "- " * 20_000 + "a",
}


@pytest.mark.parametrize("text", NESTED.values(), ids=NESTED)
def test_deep_nesting_ends_in_one_line(text: str, tmp_path: Path) -> None:
    with pytest.raises(SchemaError, match="must be nested at most 32 deep") as error:
        read(tmp_path, text)
    assert re.search(r"in .*job\.yaml:\d+; remove", str(error.value))
    assert "\n" not in str(error.value)


def test_expansion_of_anchors_is_bounded(tmp_path: Path) -> None:
    lines = ["name: a", "a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 9)]
    with pytest.raises(SchemaError, match="at most 100,000 keys and values, aliases expanded"):
        read(tmp_path, "\n".join(lines))


def test_anchor_that_stands_for_itself_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SchemaError, match=r"anchor contains itself: \*a in .*:2; write"):
        read(tmp_path, "name: a\ngroups: &a {user: *a}\n")


def test_large_document_is_refused_before_it_is_parsed(tmp_path: Path) -> None:
    with pytest.raises(SchemaError, match="must have at most 4,194,304 characters, got 5,000,000"):
        read(tmp_path, "#" * 5_000_000)


def test_anchors_are_read(tmp_path: Path) -> None:
    text = "name: a\ngroups: {user: &columns [a, b], item: *columns}\n"
    assert read(tmp_path, text).groups == {"user": ("a", "b"), "item": ("a", "b")}
