"""Whether the program of an exported model can be loaded without running what it brings.

`torch.export.load` unpickles tensors that were not stored as plain bytes, custom objects and
example inputs, and hands symbolic sizes to an evaluator. A program that has any of the first, or
sizes that are more than sums and products of symbols, is refused before torch sees it.
"""

from __future__ import annotations

import io
import json
import re
import zipfile
from collections.abc import Iterator
from typing import Any, cast

from schemas.errors import SchemaError

_MEMBERS = re.compile(
    r"[^/]+/(archive_format|archive_version|byteorder|version|\.data/\w+"
    r"|\.format_version|\.storage_alignment"
    r"|models/model\.json"
    r"|data/weights/(weight_\d+|model_weights_config\.json)"
    r"|data/constants/(tensor_\d+|model_constants_config\.json)"
    r"|data/sample_inputs/model\.pt)"
)
_NAMES = "Add|Mul|Integer|Max|Min|Eq|Ne|Gt|Ge|Lt|Le|FloorDiv|Mod"
_SYMBOL = r"Symbol\('[su]\d+'(?:, (?:positive|nonnegative|integer)=True)*\)"
_EXPRESSION = re.compile(rf"(?:{_SYMBOL}|[su]\d+|\d+|{_NAMES}|[-+*/(), <>])*")
_TARGET = re.compile(r"torch\.ops\.aten\.\w+\.\w+|_operator\.\w+|torch\.sym_\w+|math\.\w+")


def check_program(data: bytes, *, file: str) -> None:
    """Refuse a program whose loading would unpickle or evaluate something.

    Args:
        data: of the program.
        file: that it lies in, for errors.

    Raises:
        SchemaError: it is no program, or not safe to load.
    """
    try:
        problem = _problem(data)
    except (zipfile.BadZipFile, ValueError, KeyError, TypeError, AttributeError) as error:
        problem = f"{type(error).__name__}: {error}"
    if problem is not None:
        raise SchemaError(
            f"program must hold plain tensors and torch's own operators, got {problem}; "
            "export the run again",
            file=file,
        )


def _problem(data: bytes) -> str | None:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        for info in archive.infolist():
            if _MEMBERS.fullmatch(info.filename) is None:
                return f"member {info.filename!r}"
            if info.filename.endswith("sample_inputs/model.pt") and info.file_size:
                return "example inputs"
        for name in (n for n in archive.namelist() if n.endswith("_config.json")):
            payloads = json.loads(archive.read(name))["config"].values()
            if any(payload["use_pickle"] is not False for payload in payloads):
                return f"a pickle in {name!r}"
        [graph] = [n for n in archive.namelist() if n.endswith("/models/model.json")]
        return _of_graph(json.loads(archive.read(graph)))


def _of_graph(graph: Any) -> str | None:
    for key, value in _pairs(graph):
        if key == "expr_str" and _EXPRESSION.fullmatch(str(value)) is None:
            return f"size {str(value)[:60]!r}"
        if key == "target" and isinstance(value, str) and _TARGET.fullmatch(value) is None:
            return f"operator {value[:60]!r}"
    return None


def _pairs(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield every key of nested mappings and lists with its value."""
    if isinstance(value, dict):
        for key, inner in cast(dict[str, Any], value).items():
            yield key, inner
            yield from _pairs(inner)
    elif isinstance(value, list):
        for inner in cast(list[Any], value):
            yield from _pairs(inner)
