"""Concatenated documents cut into rows, as torchtitan's text datasets cut them.

A row is `seq_len` (input, label) pairs. Labels are shifted within a document, so a document of t tokens has t - 1
pairs, and its last token does not predict the next document. Positions start at 0 with every document and with every
row, even within a document. So every position is below seq_len, and torchtitan's document masks start at each 0."""

from bisect import bisect_right

import numpy as np


class Documents:
    """The tokens of many documents, and the start of each document.

    Args:
        tokens: integer array of shape [count]; may be memory-mapped.
        starts: integer array of shape [documents + 1], strictly rising from 0 to count; may be memory-mapped.
            Every document has at least one token.
        max_id: the largest token id. A row with a larger id is refused.
        name: the documents' name in error messages.
        content: text that is equal for equal tokens, e.g. with a digest of them.
    """

    def __init__(self, tokens: np.ndarray, starts: np.ndarray, max_id: int, name: str = "", content: str = ""):
        self.tokens, self.starts, self.max_id = tokens, starts, max_id
        self.name, self.content = name, content

    def __len__(self) -> int:
        return len(self.starts) - 1

    @property
    def pairs(self) -> int:
        """Number of (input, label) pairs in all documents."""
        return len(self.tokens) - len(self)

    def rows(self, seq_len: int) -> int:
        """Return the number of full rows. The pairs after the last full row are not used."""
        return self.pairs // seq_len

    def _first_pair(self, document: int) -> int:
        # Each document before this one has one pair fewer than tokens.
        return int(self.starts[document]) - document

    def row(self, index: int, seq_len: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return inputs, labels and positions of row `index`, from 0: int64, shape [seq_len] each. Costs a binary
        search among the documents and reading seq_len tokens. Raises ValueError, which names the documents, if starts
        or tokens are inconsistent, as in a damaged file."""
        begin = index * seq_len
        first = bisect_right(range(len(self)), begin, key=self._first_pair) - 1
        if first < 0:
            raise self._damaged(index)
        # A row of seq_len pairs overlaps at most seq_len documents that have pairs. Any number of one-token documents,
        # which have none, may be between them, so the last document has to be searched for.
        last = bisect_right(range(len(self)), begin + seq_len - 1, lo=first, key=self._first_pair) - 1
        first_pairs = self.starts[first : last + 1].astype(np.int64) - np.arange(first, last + 1)
        bounds = np.append(np.maximum(first_pairs, begin), begin + seq_len)
        lengths = np.diff(bounds)
        if bounds[0] != begin or (lengths < 0).any():
            raise self._damaged(index)
        pairs = np.arange(begin, begin + seq_len)
        inputs_at = pairs + np.repeat(np.arange(first, last + 1), lengths)
        if not 0 <= inputs_at[0] <= inputs_at[-1] <= len(self.tokens) - 2:
            raise self._damaged(index)
        span = self.tokens[inputs_at[0] : inputs_at[-1] + 2].astype(np.int64)
        if span.max() > self.max_id:
            raise self._damaged(index)
        inputs_at -= inputs_at[0]
        return span[inputs_at], span[inputs_at + 1], pairs - np.repeat(bounds[:-1], lengths)

    def _damaged(self, index: int) -> ValueError:
        return ValueError(f"{self.name} is damaged: row {index} contradicts its footer. Copy or pack it again.")
