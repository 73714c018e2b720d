"""A wheel works without the source tree: it has the configs and scripts, and needs nothing else of the tree."""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

TREE = Path(__file__).resolve().parents[2]
WHAT_IS_BUILT = ("plugin", "configs", "slurm", "docs", "pyproject.toml", "setup.py", "README.md")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel. It is built from a copy of the tree, because a build leaves files in the tree."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in WHAT_IS_BUILT:
        source, target = TREE / name, folder / "tree" / name
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        else:
            target.parent.mkdir(exist_ok=True)
            shutil.copy(source, target)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--quiet", "--no-deps"]
    command = [*pip, "--no-build-isolation", "--wheel-dir", str(folder), str(folder / "tree")]
    subprocess.run(command, check=True, env=outside(), stdout=subprocess.DEVNULL)
    (found,) = folder.glob("*.whl")
    return found


def outside(**more):
    """Return the environment without PYTHONPATH, which names this tree."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | more


@pytest.fixture(scope="module")
def venv(wheel, tmp_path_factory):
    folder = tmp_path_factory.mktemp("venv")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    python = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(python), "install", "--quiet"]
    subprocess.run([*pip, "--no-deps", "--no-index", str(wheel)], check=True, env=outside())
    own = subprocess.check_output([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], text=True)
    # A path in a .pth file is searched after the wheel's own, and .pth files found there are not followed.
    (Path(own.strip()) / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder / "bin"


def everstep(venv, cwd, *args, timeout=300):
    return subprocess.run(
        [str(venv / "everstep"), *args],
        cwd=cwd, env=outside(TMPDIR=str(cwd), OMP_NUM_THREADS="1"), capture_output=True, text=True, timeout=timeout,
    )  # fmt: skip


def test_a_config_is_written_and_a_submission_shown_away_from_the_tree(venv, tmp_path):
    command = [venv / "python", "-c", "import everstep; print(everstep.__file__)"]
    where = subprocess.check_output(command, cwd=tmp_path, env=outside(), text=True)
    assert where.startswith(str(venv.parent))
    written = everstep(venv, tmp_path, "init", "demo")
    assert written.returncode == 0, written.stderr
    assert "everstep run demo.toml" in (tmp_path / "demo.toml").read_text()
    shown = everstep(venv, tmp_path, "submit", "demo.toml", "--groups", "4", "--partition", "gpu", "--dry-run")
    assert shown.returncode == 0, shown.stderr
    scripts = [Path(word) for word in shown.stdout.split() if word.endswith(".sbatch")]
    assert len(scripts) == 2
    assert all(script.is_file() and script.is_relative_to(venv.parent) for script in scripts)
    assert f"{venv}/everstep" in shown.stdout
    assert everstep(venv, tmp_path, "init", "slurm").returncode == 0
    assert os.access(tmp_path / "submit.sh", os.X_OK)
