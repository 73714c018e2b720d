"""Exit statuses by which the processes of a run tell their parents what should happen next, and how to end with one."""

import contextlib
import os
import sys
from typing import NoReturn

USAGE_EXIT = 2
"""The command line or the config is not valid (also the status of argument parsers): starting again cannot help."""

GAVE_UP_EXIT = 3
"""Of an agent: its group failed for good and should not be started again."""

NODE_BAD_EXIT = 5
"""Of an agent: its group should be started again on another node."""

FENCED_EXIT = 6
"""Of an agent or a trainer: its group was started again elsewhere."""

HOPELESS_EXIT = 64
"""Of a trainer: another start would end the same way, for instance because training diverged."""

UNFIT_EXIT = 65
"""Of a trainer: its machine cannot be trusted, because its results were wrong repeatedly."""


def end_at_once(status: int) -> NoReturn:
    """Flush the standard streams and end this process without the interpreter's clean-up, in which one that imported
    triton prints thirty lines about leaks on stderr."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(status)


class TrainerEnds(Exception):
    """A trainer decided to end for good. Its process exits with `status`, and its launcher reports the text."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status
