"""The demo's job with fewer columns and tables, which is built and trained in less time."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

DROPPED = (
    *("user_region", "user_city", "user_language", "user_device", "user_os", "user_segment"),
    *("user_interest", "user_tier", "item_subcategory", "item_seller", "item_price_band"),
    *("item_color", "item_topic", "item_campaign", "item_creative", "item_format"),
    *("item_age_band", "slot"),
)
"""Columns that are left out, with their tables."""


def write_small_demo(repository: Path, folder: Path, changes: Mapping[str, str]) -> str:
    """Write `schema.pbtxt` to a folder and return the text of the job.

    Args:
        repository: root of the source tree.
        folder: of the job.
        changes: text in the job -> what takes its place.
    """
    demo, dropped = repository / "schemas" / "demo", "|".join(DROPPED)
    schema = (demo / "schema.pbtxt").read_text()
    features = re.sub(rf'feature {{\n  name: "({dropped})"\n.*?\n}}\n', "", schema, flags=re.DOTALL)
    assert schema.count("feature {") - features.count("feature {") == len(DROPPED)
    (folder / "schema.pbtxt").write_text(features)
    text = (demo / "job.yaml").read_text()
    text = re.sub(rf"    \w+: {{features: \[({dropped})\][^\n]*\n", "", text)
    text = re.sub(rf"\b({dropped}), ", "", text)
    text = text.replace("SELECT *", f"SELECT * EXCLUDE ({', '.join(DROPPED)})")
    for old, new in changes.items():
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return text
