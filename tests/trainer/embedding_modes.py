"""Modes of `--embedding`, with their caches, files and stores: all train the same bits."""

from __future__ import annotations

from typing import Any

MODES: dict[str, tuple[dict[str, str], dict[str, Any]]] = {
    "plain": ({}, {}),
    "log, TTL": ({"lookahead": "2"}, {"embedding": "cached"}),
    "log, small Belady cache": ({"policy": "belady", "rows": "250"}, {"embedding": "cached"}),
    "LRU": ({"rows": "224"}, {"embedding": "lru"}),
    "log, Belady": ({"policy": "belady"}, {"embedding": "cached"}),
    "mapped files, TTL": ({"files": "mmap", "lookahead": "50"}, {"embedding": "cached"}),
    "no cache": ({}, {"embedding": "uncached"}),
    "mapped files, small Belady cache": (
        {"files": "mmap", "policy": "belady", "rows": "252"},
        {"embedding": "cached"},
    ),
    "two stores": ({"lookahead": "5"}, {"embedding": "cached", "stores": 2}),
    "three stores": ({}, {"embedding": "cached", "stores": 3}),
    "one store, no cache": ({}, {"embedding": "uncached", "stores": 1}),
    "two stores, LRU": ({"rows": "225"}, {"embedding": "lru", "stores": 2}),
}
"""Changes of the job and options of the run of each mode."""
