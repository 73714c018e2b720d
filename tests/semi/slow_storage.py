"""tiny_llama on a storage of workers' states that takes SLOW_WRITE seconds to open a file for writing."""

import os
import time

from tiny_llama import tiny as _tiny

_open = os.open


def _slow(path, flags, *args, **kwargs):
    if flags & os.O_CREAT and "/state/workers/" in os.fspath(path):
        time.sleep(float(os.environ["SLOW_WRITE"]))
    return _open(path, flags, *args, **kwargs)


def tiny():
    os.open = _slow
    return _tiny()
