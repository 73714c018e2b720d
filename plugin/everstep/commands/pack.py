"""`everstep pack`: a token file from text."""

from collections.abc import Sequence

from everstep.data.pack import Pack
from everstep.data.pack import run as write
from everstep.titan.data.encoders import encoder_for

__all__ = ["Pack", "pack"]


def pack(command: Pack, flags: Sequence[str]) -> int:
    """Returns the exit status."""
    return write(command, encoder_for)
