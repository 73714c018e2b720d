"""The one error a config raises, and how it says what was probably meant."""

import difflib
from collections.abc import Iterable


class ConfigError(ValueError):
    """A config that cannot be used. `str()` is one sentence a user can act on: file, line, key, what is
    wrong."""


def nearest(word: str, candidates: Iterable[str]) -> str | None:
    """The candidate most like `word`, or None if there is none at all.

    Prefers a candidate that differs only by words added or left out (`batch_size` → `local_batch_size`),
    then the smallest edit distance as difflib sees it. There is no cutoff: of the wrong keys, one nearest
    valid key is always worth naming.
    """
    ranked = sorted(candidates)
    if not ranked:
        return None

    def likeness(candidate: str) -> tuple[float, str]:
        contains = 0.5 if word and (word in candidate or candidate in word) else 0.0
        return (-contains - difflib.SequenceMatcher(None, word, candidate).ratio(), candidate)

    return min(ranked, key=likeness)
