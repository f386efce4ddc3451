"""Commands of the data pipelines: `python -m presage.pipelines COMMAND ...`."""

import logging
import os
import sys
from importlib import import_module
from importlib.abc import MetaPathFinder


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
    from presage.schemas.entry import run_command

    hide_pandas("".join(sys.argv[1:2]))
    run_command(lambda: import_module("presage.pipelines.__main__").main)

# Set before Beam is imported: Beam warns of each optional package that is not installed, and logs
# tracebacks of errors that `main` reports in one line.
logging.basicConfig(level=os.environ.get("PRESAGE_LOG", "CRITICAL"))

from presage.pipelines.cli import build_parser, main

__all__ = ["build_parser", "hide_pandas", "main"]
