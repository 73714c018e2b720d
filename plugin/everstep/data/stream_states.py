"""States of data streams, as they travel between groups and into checkpoints."""

import struct
from dataclasses import dataclass

_HEADER = struct.Struct("<8sI")
_ENTRY = struct.Struct("<IQQ")
_MAGIC = b"evrstrm2"
_OLD_MAGIC = b"evrstrm1"
"""Its states were pickles, which are not read any more."""


@dataclass(frozen=True)
class StreamState:
    """Where a stream stands."""

    position: int
    """Batches taken from it since its beginning."""

    state: bytes
    """What its dataloader needs to go on there, as `everstep.data.plain` has it."""


def encode_states(states: dict[int, StreamState]) -> bytes:
    """`states` by stream number, as bytes that `decode_states` reads."""
    parts = [_HEADER.pack(_MAGIC, len(states))]
    for stream, known in sorted(states.items()):
        parts += [_ENTRY.pack(stream, known.position, len(known.state)), known.state]
    return b"".join(parts)


def decode_states(data: bytes) -> dict[int, StreamState]:
    """The states in `data`; none in empty data, nor in data of a version that held pickles: a stream of which nothing
    is known is read from its beginning. Raises ValueError if it is no such data or cut off."""
    if not data or data[: len(_OLD_MAGIC)] == _OLD_MAGIC:
        return {}
    states = {}
    try:
        magic, count = _HEADER.unpack_from(data)
        if magic != _MAGIC:
            raise ValueError("these are no stream states")
        at = _HEADER.size
        for _ in range(count):
            stream, position, length = _ENTRY.unpack_from(data, at)
            at += _ENTRY.size
            if length > len(data) - at:
                raise ValueError("stream states are cut off")
            states[stream] = StreamState(position, bytes(data[at : at + length]))
            at += length
    except struct.error:
        raise ValueError("stream states are cut off") from None
    if at != len(data):
        raise ValueError(f"stream states have {len(data)} bytes where {at} were announced")
    return states
