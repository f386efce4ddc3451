"""The words by which a job names types of columns."""

from __future__ import annotations

import pyarrow as pa

from schemas.errors import nearest

_WORDS = {
    "int8": pa.int8(), "int16": pa.int16(), "int32": pa.int32(), "int64": pa.int64(),
    "uint8": pa.uint8(), "uint16": pa.uint16(), "uint32": pa.uint32(), "uint64": pa.uint64(),
    "float32": pa.float32(), "float64": pa.float64(), "bool": pa.bool_(), "string": pa.string(),
    "binary": pa.binary(), "date": pa.date32(), "timestamp": pa.timestamp("us"),
    "timestamp_s": pa.timestamp("s"), "timestamp_ms": pa.timestamp("ms"),
    "timestamp_us": pa.timestamp("us"), "timestamp_ns": pa.timestamp("ns"),
}  # fmt: skip


def arrow_type(text: str) -> pa.DataType:
    """Return the Arrow type that a word such as `int64` or `list<int64>` names.

    Raises:
        ValueError: no type has that name.

    Example:
        >>> arrow_type("list<int64>")
        LargeListType(large_list<item: int64>)
        >>> arrow_type("struct<id: int64, tags: list<string>>")
        StructType(struct<id: int64, tags: large_list<item: string>>)
    """
    word = text.strip()
    if word.startswith("list<") and word.endswith(">"):
        return pa.large_list(arrow_type(word[5:-1]))
    if word.startswith("struct<") and word.endswith(">"):
        fields = [part.partition(":") for part in _parts(word[7:-1])]
        return pa.struct([pa.field(name.strip(), arrow_type(kind)) for name, _, kind in fields])
    if word not in _WORDS:
        raise ValueError(f"type must be known, got {text!r}; {nearest(word, _WORDS)}")
    return _WORDS[word]


def word_of(kind: pa.DataType) -> str | None:
    """Return the word that names a type, None when there is none.

    Example:
        >>> word_of(arrow_type("struct<id: int64, tags: list<string>>"))
        'struct<id: int64, tags: list<string>>'
    """
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        inner = word_of(kind.value_type)
        return inner and f"list<{inner}>"
    if pa.types.is_struct(kind):
        fields = [(field.name, word_of(field.type)) for field in kind]
        known = all(word for _, word in fields)
        return f"struct<{', '.join(f'{n}: {word}' for n, word in fields)}>" if known else None
    return next((word for word, known in _WORDS.items() if known == kind), None)


def type_text(kind: pa.DataType) -> str:
    """Return the word that names a type, or what Arrow calls one without."""
    return word_of(kind) or str(kind)


def _parts(text: str) -> list[str]:
    """Split at the commas that stand in no brackets."""
    found, depth = [""], 0
    for character in text:
        depth += (character == "<") - (character == ">")
        if character == "," and not depth:
            found.append("")
        else:
            found[-1] += character
    return found


def arrow_schema(columns: dict[str, str]) -> pa.Schema:
    """Return the schema of declared columns.

    Raises:
        ValueError: a type has no such name.
    """
    return pa.schema([pa.field(name, arrow_type(kind)) for name, kind in columns.items()])
