"""tiny_llama whose group HELD_GROUP stops for ever before it writes to a checkpoint, while the file HELD exists; or
finds no room, if there is a word in it. The file's name with `.reached` says so."""

import errno
import os
import threading
from pathlib import Path

from torch.distributed.checkpoint import FileSystemWriter

from tiny_llama import tiny as _tiny

_write = FileSystemWriter.write_data


def _held(writer, *args, **kwargs):
    held = Path(os.environ.get("HELD", "none"))  # a process that imported this may run other tests
    if held.exists() and f"writing-trainer-{os.environ['HELD_GROUP']}-" in str(writer.path):
        held.with_suffix(".reached").touch()
        if held.read_text():
            raise OSError(errno.ENOSPC, "No space left on device")
        threading.Event().wait()
    return _write(writer, *args, **kwargs)


def tiny():
    FileSystemWriter.write_data = _held
    return _tiny()
