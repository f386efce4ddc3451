"""Files and folders of a user in a folder that Presage writes to: they stay whatever it does."""

from __future__ import annotations

from pathlib import Path

FILES = ("notes.txt", "best.bin", "x.partial", "5", "²", "manifest.json.bak", ".hidden", "a b\nc")
FOLDERS = ("best-auc", "00000002 copy", "00000002.bak", "7", "backup.partial", "old.ahead")


def add_foreign(folder: Path) -> dict[Path, bytes]:
    """Put files and folders of hostile names at each level of a folder; return their contents.

    Some are copies of folders that are there.
    """
    found = [folder, *(path for path in folder.rglob("*") if path.is_dir())]
    added: dict[Path, bytes] = {}
    for parent in found:
        for name in (*FILES, *(f"{each}/{'MANIFEST.json'}" for each in FOLDERS)):
            path = parent / name
            if not path.exists() and not path.parent.is_file():
                path.parent.mkdir(exist_ok=True)
                path.write_bytes(b"of the user")
                added[path] = path.read_bytes()
        copied = parent / "copied-by-user"
        for path in [each for each in parent.iterdir() if each.is_file()]:
            copied.mkdir(exist_ok=True)
            (copied / path.name).write_bytes(path.read_bytes())
            added[copied / path.name] = path.read_bytes()
    return added


def assert_untouched(added: dict[Path, bytes]) -> None:
    """Assert that each file of a user has its bytes."""
    changed = [p for p, data in added.items() if not p.is_file() or p.read_bytes() != data]
    assert changed == []
