"""The files that come with Everstep beside its code: example configs, Slurm scripts, dashboards.

They stand at the top of the source tree, where people look for them, and inside the package in a wheel.
"""

from pathlib import Path

PACKAGE = Path(__file__).resolve().parent


def folder(name: str) -> Path:
    """Where the files of one kind are: "configs", "slurm" or "docs" (dashboards and alerts)."""
    packed = PACKAGE / "files" / name
    return packed if packed.is_dir() else PACKAGE.parents[1] / name
