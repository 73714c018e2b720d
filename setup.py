"""What pyproject.toml cannot say: a wheel also holds the files that stand at the top of the tree."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

HERE = Path(__file__).resolve().parent
FILES = {"configs": "**/*.toml", "slurm": "*.s*", "docs": "*.[jy]*"}
"""Folders of the tree that become `everstep/files/…` (see `everstep.files`), and which of their files."""


class BuildWithFiles(build_py):
    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        for folder, pattern in FILES.items():
            for source in (HERE / folder).glob(pattern):
                target = Path(self.build_lib) / "everstep" / "files" / folder / source.relative_to(HERE / folder)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(source, target)


setup(cmdclass={"build_py": BuildWithFiles})
