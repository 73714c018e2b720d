"""Is this node fit to train on? A few things that break on single nodes and that a trainer would only meet later."""

import os
import shutil
import tempfile
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
SMALLEST_FREE_BYTES = 64 << 20


def complaint(run_dir: Path | None) -> str:
    """What is wrong with this node; "" if nothing is.

    The run directory, if there is one, and a local temporary folder take a write, and shared memory has room for what a
    trainer's processes exchange.
    """
    folders = [Path(tempfile.gettempdir())]
    if run_dir is not None:
        folders.insert(0, run_dir / "state")
    for folder in folders:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            # Others may write to a temporary folder: a name that nobody can have put a link under.
            with tempfile.NamedTemporaryFile(dir=folder, prefix=".fit-") as file:
                file.write(b"x" * 4096)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            return f"{folder} cannot be written: {error.strerror}"
    if SHARED_MEMORY.exists():
        free = shutil.disk_usage(SHARED_MEMORY).free
        if free < SMALLEST_FREE_BYTES:
            return f"{SHARED_MEMORY} has {free >> 20} MiB free, {SMALLEST_FREE_BYTES >> 20} are needed"
    return ""
