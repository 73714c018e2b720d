"""The error that every refused config raises, and the search for the key that the user probably meant."""

import difflib
from collections.abc import Iterable


class ConfigError(ValueError):
    """A config cannot be used. `str()` is one sentence for the user: file, line and key if known, and what is wrong."""


def nearest(word: str, candidates: Iterable[str]) -> str | None:
    """Return the candidate most similar to `word`, or None if there are no candidates.

    Similarity is difflib's ratio, plus 0.5 if one contains the other (`batch_size` → `local_batch_size`). There is no
    lower limit, because the nearest valid key is always worth naming.
    """

    def likeness(candidate: str) -> float:
        contains = 0.5 if word and (word in candidate or candidate in word) else 0.0
        return contains + difflib.SequenceMatcher(None, word, candidate).ratio()

    return max(sorted(candidates), key=likeness, default=None)
