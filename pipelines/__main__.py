"""Commands of the data pipelines: `python -m pipelines COMMAND ...`."""

import logging
import os
import sys
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.util import find_spec
from pathlib import Path


class _NoPandas(MetaPathFinder):
    """Hides pandas, which pyarrow imports if it is installed, in a second; torch needs it."""

    def find_spec(self, fullname: str, path: object, target: object = None) -> None:
        if fullname == "pandas":
            raise ModuleNotFoundError("pandas is not used by these commands", name=fullname)


def hide_pandas(command: str) -> None:
    """Hide pandas in this process, unless the command is `score`, which imports torch."""
    if command != "score":
        sys.meta_path.insert(0, _NoPandas())


if __name__ == "__main__":
    _root, _spec = Path(__file__).resolve().parents[1], find_spec("schemas")
    if _spec is None or _spec.origin != str(_root / "schemas" / "__init__.py"):
        sys.exit(
            f"error: package schemas of {_root} is hidden by {_spec and _spec.origin}; run "
            "`presage`, or start in another folder"
        )
    from schemas.entry import run_command

    hide_pandas("".join(sys.argv[1:2]))
    run_command(lambda: import_module("pipelines.__main__").main)

# Set before Beam is imported: Beam warns of each optional package that is not installed, and logs
# tracebacks of errors that `main` reports in one line.
logging.basicConfig(level=os.environ.get("PRESAGE_LOG", "CRITICAL"))

from pipelines.cli import build_parser, main

__all__ = ["build_parser", "hide_pandas", "main"]
