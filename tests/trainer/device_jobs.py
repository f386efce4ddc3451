"""Jobs of every model on a device."""

from pathlib import Path

MODELS = {
    "dlrm": "{name: dlrm, top_layers: [16]}",
    "dcn": "{name: dcn, cross_rank: 4}",
    "deepfm": "{name: deepfm}",
    "wide and deep": "{name: wide_deep}",
    "attention": "{name: attention, history: clicked, target: item, num_heads: 2}",
}


def with_device(job: Path, name: str) -> Path:
    """Name a device in a job file."""
    job.write_text(job.read_text().replace("  cache:", f"  device: {name}\n  cache:"))
    return job
