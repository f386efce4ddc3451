"""Options of what makes models to serve."""

from __future__ import annotations

import argparse
from pathlib import Path

from schemas.paths import ArgumentParser
from trainer.serving_options import not_negative


def add_export(commands: argparse._SubParsersAction[ArgumentParser]) -> None:
    """Add the commands that make models to serve."""
    made = commands.add_parser("export", help="one CPU artifact of a run's model, to serve")
    changes = commands.add_parser("publish", help="rows that changed between two checkpoints")
    for command in (made, changes):
        command.add_argument("run", type=Path, help="run folder")
        command.add_argument("--checkpoint", type=not_negative, help="its step; the newest")
    changes.add_argument("--since", type=not_negative, required=True, help="older checkpoint")
    changes.add_argument("--output", type=Path, required=True, help="new folder")
    applied = commands.add_parser("apply", help="published rows on the export of that checkpoint")
    applied.add_argument("model", type=Path, help="file from export")
    applied.add_argument("--changes", type=Path, required=True, help="folder from publish")
    for command in (made, applied):
        command.add_argument("--output", type=Path, required=True, help="file")
    for command in (made, changes, applied):
        command.add_argument("--json", action="store_true", help="one JSON object on stdout")
