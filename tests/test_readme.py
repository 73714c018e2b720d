"""The README's commands are run exactly as they are written there."""

import re
import tomllib
from pathlib import Path

import pytest

import watched

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def everstep(words, folder):
    """Run a command of the README without a shell, and return its output."""
    done = watched.everstep(*words, cwd=folder, timeout=1200.0)
    assert done.returncode == 0, f"{' '.join(words)}: {done.stdout}{done.stderr}"
    return done.stdout


def commands_of_the_readme():
    """Return the words of each `everstep` line in the README's code blocks, in order."""
    lines = re.findall(r"^    everstep (.*)$", README, flags=re.MULTILINE)
    return [line.partition("#")[0].split() for line in lines]


def test_the_readmes_first_commands_do_what_it_says(tmp_path):
    said = commands_of_the_readme()
    assert [words for words in said if words[0] in ("init", "doctor")] == [["init", "demo"], ["doctor", "demo.toml"]]
    for words in (["init", "demo"], ["doctor", "demo.toml"]):
        everstep(words, tmp_path)
    for name in re.findall(r"also ([\w., -]*), and slurm", README)[0].split(", "):
        everstep(["init", name], tmp_path)
        assert tomllib.loads((tmp_path / f"{name}.toml").read_text())["fault_tolerance"]["enable"]
    for block in re.findall(r"```toml\n(.*?)```", README, flags=re.DOTALL):
        tomllib.loads(block)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_readmes_runs_run(tmp_path):
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "demo.toml").write_text((ROOT / "configs" / "demo.toml").read_text())
    (words,) = [words for words in commands_of_the_readme() if words[:2] == ["run", "configs/demo.toml"]]
    said = everstep([*words, "--steps", "12"], tmp_path)
    assert "Every step happened with its whole batch, exactly once." in said
    (run,) = (tmp_path / "runs").iterdir()
    assert (run / "report.html").exists()
    assert "12 of 12" in everstep(["report", str(run)], tmp_path)
