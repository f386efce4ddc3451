"""Commands of the data pipelines: `python -m pipelines COMMAND ...`."""

import logging
import os
import sys
from importlib.abc import MetaPathFinder


class _NoPandas(MetaPathFinder):
    """Hides pandas, which pyarrow imports if it is installed, in a second; torch needs it."""

    def find_spec(self, fullname: str, path: object, target: object = None) -> None:
        if fullname == "pandas":
            raise ModuleNotFoundError("pandas is not used by these commands", name=fullname)


if __name__ == "__main__" and sys.argv[1:2] != ["score"]:
    sys.meta_path.insert(0, _NoPandas())

# Set before Beam is imported: Beam warns of each optional package that is not installed, and logs
# tracebacks of errors that `main` reports in one line.
logging.basicConfig(level=os.environ.get("PRESAGE_LOG", "CRITICAL"))

from pipelines.cli import build_parser, main  # noqa: E402

__all__ = ["build_parser", "main"]

if __name__ == "__main__":
    sys.exit(main())
