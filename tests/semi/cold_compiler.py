"""tiny_llama in processes each of which compiles everything itself."""

import os
import tempfile

from tiny_llama import tiny as _tiny


def tiny():
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp()
    os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"
    return _tiny()
