"""A package that cannot be imported any more once TMPDIR/upgraded is there, as after an upgrade in place."""

import os
from pathlib import Path

if (Path(os.environ.get("TMPDIR", "/tmp")) / "upgraded").exists():
    raise ImportError("it was upgraded")
