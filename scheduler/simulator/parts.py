"""What of our policy can be turned off, to see what each part is worth."""

from __future__ import annotations

from dataclasses import dataclass, replace

from scheduler.policy import HASTE


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What of our policy is on. What is not of `LIVE` is not done by the scheduler that runs."""

    haste: float = HASTE
    """By what power time counts against cost."""
    urgent: bool = True
    """Whether jobs with less left go first, and gain more."""
    fit_cores: bool = True
    """Whether processes get the cores that they keep busy, not those of the request."""
    kin: bool = True
    """Whether jobs of a kind tell each other what cores they need, at each of their sizes."""
    give_back: bool = True
    """Whether memory that is not needed is given back, and more is given before it is urgent."""
    grow_after_oom: bool = True
    """Whether a job that ran out of memory gets more."""
    sample: bool = True
    """Whether the first jobs of a kind run at sizes that are to be measured."""
    move_stores: bool = True
    """Whether stores of a job that ran may become more or fewer."""


ALL = Parts()
OFF = Parts(
    haste=1.0,
    urgent=False,
    fit_cores=False,
    kin=False,
    give_back=False,
    grow_after_oom=False,
    sample=False,
    move_stores=False,
)
"""None of them: time x cost, by priority and then by arrival."""
LIVE = replace(ALL, kin=False, sample=False)
"""What the machine does, too."""
