"""Private names of torch that this room relies on, each with what it is for.

Nothing here imports torch: the command line and an agent that has not begun do without.
tests/launch/test_private.py says which of the names a release has taken away.
"""

import sys
from typing import Any


def flight_records(backend: str) -> tuple[bytes, bytes]:
    """What this process's Flight Recorder of a backend holds: as JSON, and as torch's own dump with stacks. Empty
    where torch has not been imported. Raises RuntimeError where there is no such recorder."""
    recorder: Any = sys.modules.get("torch._C._distributed_c10d")
    if recorder is None:
        return b"", b""
    return recorder._dump_fr_trace_json(backend=backend), recorder._dump_fr_trace(backend=backend)
