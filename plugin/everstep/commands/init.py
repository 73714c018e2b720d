"""`everstep init`: write a commented file to start from."""

from pathlib import Path
from typing import Literal

import tyro

from everstep import files
from everstep.run.directory import LaunchError

SOURCES = {
    "demo": ("configs", "demo.toml"),
    "llama3_1b": ("configs", "llama3_1b.toml"),
    "llama3_8b": ("configs", "llama3_8b.toml"),
    "qwen3_0.6b": ("configs", "qwen3_0.6b.toml"),
    "slurm": ("slurm", "submit.sh"),
}
"""Name -> folder and name of its file among those that come with Everstep."""


def init(
    what: tyro.conf.Positional[Literal["demo", "llama3_1b", "llama3_8b", "qwen3_0.6b", "slurm"]],
    out: Path | None = None,
) -> int:
    """Write a commented file to start from: the config of a run, or a script that submits a run to Slurm.

    Args:
        what: demo: a config of a small model, which trains on any machine in three minutes.
            llama3_1b, llama3_8b, qwen3_0.6b: configs for GPUs. slurm: submit.sh, a script that submits a run.
        out: The file to write. Default: a file of the same name in the current folder.
    """
    kind, name = SOURCES[what]
    source, target = files.folder(kind) / name, out or Path(name)
    if target.exists():
        raise LaunchError(f"{target} exists already: remove it, or give --out another name.")
    target.write_text(source.read_text().replace(f"configs/{name}", str(target)))
    if kind == "slurm":
        target.chmod(0o755)
        print(f"{target} is written. Edit the settings at its top, then run it on a login node.")
    else:
        print(f"{target} is written. Start it: everstep run {target}")
        print(f"Check whether this machine can run it: everstep doctor {target}")
    return 0
