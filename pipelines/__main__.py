"""Commands of the data pipelines: `python -m pipelines COMMAND ...`."""

import logging
import os
import sys

# Before Beam is imported, which warns of every optional part that is not installed, and logs
# the whole trace of an error that `main` says in one line.
logging.basicConfig(level=os.environ.get("PRESAGE_LOG", "CRITICAL"))

from pipelines.commands import build_parser, main  # noqa: E402

__all__ = ["build_parser", "main"]

if __name__ == "__main__":
    sys.exit(main())
