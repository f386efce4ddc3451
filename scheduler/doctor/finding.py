"""One thing that was looked at: what must hold, what was found, and what to do."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What a check found."""

    name: str
    """What was looked at, a few words."""
    ok: bool
    """Whether it is as it must be."""
    must: str
    """The rule."""
    found: str
    """What there is instead, or what fulfils the rule."""
    fix: str
    """What to do where it is not fulfilled."""
    needed_for: str = ""
    """What works only with it; empty where nothing works without."""
    needed: bool = True
    """Whether its lack is a failure."""

    @property
    def state(self) -> str:
        """Return `ok`, `lacks` or, where it may lack, `absent`."""
        if self.ok:
            return "ok"
        return "lacks" if self.needed else "absent"


def line_of(finding: Finding) -> str:
    """Return a finding as one line.

    Example:
        >>> line_of(Finding(name="disk", ok=False, must="have 5 GiB free", found="1 GiB", fix="go"))
        'lacks   disk must have 5 GiB free, got 1 GiB; go'
    """
    line = f"{finding.state:<7} {finding.name} must {finding.must}, got {finding.found}"
    if finding.ok:
        return line
    whom = f" (needed for {finding.needed_for})" if finding.needed_for else ""
    return f"{line}{whom}; {finding.fix}"


def as_json(findings: list[Finding]) -> dict[str, Any]:
    """Return all findings as one object: `ok`, whether nothing needed lacks, and `findings`."""
    shown = [{**asdict(finding), "state": finding.state} for finding in findings]
    return {"ok": not any(f.state == "lacks" for f in findings), "findings": shown}


def one_line(text: str) -> str:
    """Return a text as one line, cut at 200 characters.

    Example:
        >>> one_line("a" + chr(10) + "  b")
        'a b'
    """
    return " ".join(text.split())[:200]
