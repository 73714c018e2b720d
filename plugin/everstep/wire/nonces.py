"""What the two ways to AES-128-GCM have in common."""

import struct

TAG_BYTES = 16
_COUNTER = struct.Struct("<Q4x")


class SealError(ValueError):
    """A message that is not what the other side sealed."""


def nonce(count: int) -> bytes:
    """The 96 bits for a direction's message number `count`."""
    return _COUNTER.pack(count)
