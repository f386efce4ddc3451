"""Keep the histories of a chunk of sessions once, as windows over one list per session.

A history shifts by what was clicked or viewed before: all histories of a session
are windows over its base history followed by what it appends. They are copied out
only when a record batch is written, which bounds the memory of what is carried.
"""

from dataclasses import dataclass

import numpy as np

MAX_HISTORY = 50


@dataclass(frozen=True, slots=True)
class Histories:
    """One list per session: its base history, then what the session appended."""

    values: np.ndarray
    lengths: np.ndarray

    def take(self, keep: np.ndarray) -> "Histories":
        """Return the lists of the sessions where `keep` is true."""
        return Histories(self.values[np.repeat(keep, self.lengths)], self.lengths[keep])

    def windows(self, session: np.ndarray, end: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return up to `MAX_HISTORY` values before each end, one list after another.

        Args:
            session: (n,) the list each window is taken from.
            end: (n,) where the window ends within its list.

        Returns:
            (n + 1,) int32 offsets and the positions of the values.
        """
        length = np.minimum(end, MAX_HISTORY)
        offsets = np.concatenate([[0], np.cumsum(length)])
        first = np.cumsum(self.lengths) - self.lengths
        shift = first[session] + end - length - offsets[:-1]
        return offsets.astype(np.int32), np.arange(offsets[-1]) + np.repeat(shift, length)


@dataclass(frozen=True, slots=True)
class Chunk:
    """Samples, in session order, with the histories of their sessions.

    `samples["session"]` is the row of a sample's session in both histories, and
    `samples["clicked_end"]`, `samples["viewed_end"]` where its windows end.
    """

    samples: dict[str, np.ndarray]
    clicked: Histories
    viewed: Histories

    @property
    def num_samples(self) -> int:
        """Return the number of samples."""
        return len(self.samples["time"])

    def take(self, keep: np.ndarray) -> "Chunk":
        """Return the samples where `keep` is true, and only their sessions."""
        samples = {name: column[keep] for name, column in self.samples.items()}
        live = np.zeros(len(self.clicked.lengths), dtype=bool)
        live[samples["session"]] = True
        samples["session"] = (np.cumsum(live) - 1)[samples["session"]]
        return Chunk(samples, self.clicked.take(live), self.viewed.take(live))


def concat_chunks(a: Chunk, b: Chunk) -> Chunk:
    """Return the samples of `a`, then those of `b`."""
    moved = b.samples | {"session": b.samples["session"] + len(a.clicked.lengths)}
    return Chunk(
        {name: np.concatenate([column, moved[name]]) for name, column in a.samples.items()},
        _concat_histories(a.clicked, b.clicked),
        _concat_histories(a.viewed, b.viewed),
    )


def _concat_histories(a: Histories, b: Histories) -> Histories:
    return Histories(np.concatenate([a.values, b.values]), np.concatenate([a.lengths, b.lengths]))
