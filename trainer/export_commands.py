"""What `export`, `publish` and `apply` of the command line do."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from trainer.export import export_run
from trainer.publish import apply_changes, publish

COMMANDS: dict[str, Callable[[argparse.Namespace], Any]] = {
    "export": lambda a: export_run(a.run, a.output, a.checkpoint),
    "publish": lambda a: publish(a.run, a.output, a.since, a.checkpoint),
    "apply": lambda a: apply_changes(a.model, a.changes, a.output),
}
"""By command: from its arguments to a dataclass of what was made."""
