"""Documents laid end to end and cut into rows, as torchtitan's text datasets cut them.

A row is `seq_len` (input, label) pairs. Labels are shifted within a document, so a document of t tokens gives
t - 1 pairs and its last token is never asked to predict the next document. Positions count from 0 in every
document and from 0 at the start of every row: a document cut by a row's end goes on at 0 in the next one,
which keeps every position below seq_len and tells document masks where attention ends."""

from bisect import bisect_right

import numpy as np

_DAMAGED = (
    "row {} of the token file is not what its footer says: it is damaged. Check it with `everstep pack --verify`."
)


class Documents:
    """Tokens of many documents and where each starts.

    Args:
        tokens: integer array of shape [count]; may be memory-mapped.
        starts: integer array of shape [documents + 1], strictly rising from 0 to count; may be memory-mapped.
            Every document has at least one token.
        max_id: the largest token id. A row with a larger one is refused.
        name: how errors name the documents.
        content: a digest of the tokens, equal where they are.
    """

    def __init__(self, tokens: np.ndarray, starts: np.ndarray, max_id: int, name: str = "", content: str = ""):
        self.tokens, self.starts, self.max_id = tokens, starts, max_id
        self.name, self.content = name, content

    def __len__(self) -> int:
        return len(self.starts) - 1

    @property
    def pairs(self) -> int:
        """How many (input, label) pairs the documents give."""
        return len(self.tokens) - len(self)

    def rows(self, seq_len: int) -> int:
        """How many full rows there are. What is left after the last one is not used."""
        return self.pairs // seq_len

    def _first_pair(self, document: int) -> int:
        # Each document before this one has one pair less than it has tokens.
        return int(self.starts[document]) - document

    def row(self, index: int, seq_len: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Inputs, labels and positions of row `index`, 0-based: int64, shape [seq_len] each. Costs a binary search
        among the documents and seq_len tokens read.

        Raises ValueError where starts or tokens are not what they should be, as in a damaged file.
        """
        begin = index * seq_len
        first = bisect_right(range(len(self)), begin, key=self._first_pair) - 1
        # A row of seq_len pairs meets at most seq_len documents that have pairs. One-token documents have
        # none; they may lie between, so the last document is searched for and not bounded.
        last = bisect_right(range(len(self)), begin + seq_len - 1, lo=first, key=self._first_pair) - 1
        first_pairs = self.starts[first : last + 1].astype(np.int64) - np.arange(first, last + 1)
        bounds = np.append(np.maximum(first_pairs, begin), begin + seq_len)
        lengths = np.diff(bounds)
        if first < 0 or len(bounds) != last - first + 2 or (lengths < 0).any():
            raise ValueError(_DAMAGED.format(index))
        pairs = np.arange(begin, begin + seq_len)
        inputs_at = pairs + np.repeat(np.arange(first, last + 1), lengths)
        if not 0 <= inputs_at[0] <= inputs_at[-1] <= len(self.tokens) - 2 or len(inputs_at) != seq_len:
            raise ValueError(_DAMAGED.format(index))
        span = self.tokens[inputs_at[0] : inputs_at[-1] + 2].astype(np.int64)
        if span.max() > self.max_id:
            raise ValueError(_DAMAGED.format(index))
        inputs_at -= inputs_at[0]
        return span[inputs_at], span[inputs_at + 1], pairs - np.repeat(bounds[:-1], lengths)
