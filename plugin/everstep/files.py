"""The files that Everstep ships beside its code: example configs, Slurm scripts, dashboards.

They are at the top of the source tree, where people look for them. In a wheel they are inside the package.
"""

from pathlib import Path

PACKAGE = Path(__file__).resolve().parent


def folder(name: str) -> Path:
    """Return the folder of one kind of files: "configs", "slurm" or "docs" (dashboards and alerts)."""
    packed = PACKAGE / "files" / name
    return packed if packed.is_dir() else PACKAGE.parents[1] / name
