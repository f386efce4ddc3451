"""The job file: its dataclasses and its reader."""
