"""A run directory of which any file is damaged, under all commands that read one: an exit status and no traceback."""

import json
import random
import shutil

import pytest

from damage import damaged
from everstep import cli
from everstep.commands import watch
from everstep.data.pack import Pack, pack
from everstep.run.address import publish_address
from everstep.run.beats import BeatFile, beat_path
from everstep.run.directory import GroupOver, RunDir, over_file
from everstep.run.fence import Claim, claim_group
from everstep.run.files import write_json
from everstep.run.token import run_token
from simulator import Simulator

COMMANDS = (
    ("status",), ("watch",), ("report", "--json"), ("report", "--check"), ("report", "--against", "OTHER"), ("stop",),
    ("same", "OTHER"), ("snapshots",), ("chaos", "--every", "5"), ("scale", "--groups", "3"),
)  # fmt: skip


@pytest.fixture
def run_dir(tmp_path):
    folder, run = tmp_path / "run", Simulator(2, slots=4, seed=0)
    for index in range(20):
        run.play({5: "kill", 6: "revive"}.get(index, "go"), index)
    run.events()
    run.log.add(99, "agent_ended", 1, role="agent", status="failed", reason="group 1 is given up")
    run.log.add(99, "run_ended", role="supervisor", status="failed", reason="no group is left").write(folder)
    (folder / "config.toml").write_text(
        '[job]\nmodule = "llama3"\n[training]\nsteps = 9\n[fault_tolerance]\ngroups = 2\nnotify = "http://h/x"\n'
    )
    run_token(folder)
    publish_address(folder, "http://127.0.0.1:29510", 7)
    BeatFile(beat_path(folder, 0, 0)).beat("compute", 5)
    claim_group(folder, 0, Claim(1, 0), lambda: True)
    write_json(over_file(folder, 1), GroupOver("failed", "given up").__dict__)
    RunDir(folder).lock()
    RunDir(folder).unlock()
    (tmp_path / "in.txt").write_text("some text " * 99)
    pack(Pack((tmp_path / "in.txt",), folder / "corpus.tokens"))
    shutil.copytree(folder, tmp_path / "other")
    return folder


@pytest.mark.parametrize("rounds", [100, pytest.param(10_000, marks=pytest.mark.slow)])
def test_every_command_ends_with_a_status(run_dir, monkeypatch, capsys, rounds):
    def enough(pause_s):
        raise KeyboardInterrupt

    monkeypatch.setattr(watch.time, "sleep", enough)  # a run without an end is watched for ever
    files = sorted(path for path in run_dir.rglob("*") if path.is_file())
    whole, chance, statuses = {path: path.read_bytes() for path in files}, random.Random(rounds), set()
    for number in range(rounds):
        path = chance.choice(files)
        path.write_bytes(damaged(whole[path], chance))
        if path.suffix == ".tokens":
            words = ["pack", "--verify", "--out", str(path)]
        else:
            name, *more = COMMANDS[number % len(COMMANDS)]
            words = [name, str(run_dir), *(str(run_dir.with_name("other")) if one == "OTHER" else one for one in more)]
        with pytest.raises(SystemExit) as ended:
            cli.main(words)
        said = "".join(capsys.readouterr())
        assert ended.value.code in (0, 1, 2, cli.INTERRUPTED_EXIT), (words, path, said)
        assert "Traceback" not in said
        assert json.dumps(said).count("\\u001b[2J") == 0, "nothing of it is obeyed by a terminal"
        statuses.add(ended.value.code)
        for one, data in whole.items():
            if not one.is_file() or one.read_bytes() != data:
                one.unlink(missing_ok=True)
                one.write_bytes(data)
    assert statuses >= {0, 1, 2}
