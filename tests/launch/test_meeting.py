"""What a worker learns of its place in the group."""

import json
import os
import sys

from everstep.launch.meeting import Round
from forked import ran

SCRIPT = "import json, os; print(json.dumps(dict(os.environ)))"


def test_a_worker_finds_what_torchrun_would_have_set(tmp_path):
    """Whatever this version of torchrun sets."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    environment = {key: value for key, value in os.environ.items() if not key.startswith("TORCH")}
    options = ["--standalone", "--nproc-per-node", "1"]
    done = ran([sys.executable, "-m", "torch.distributed.run", *options, str(script)], env=environment)
    assert done.returncode == 0, done.stderr
    theirs = json.loads(done.stdout.splitlines()[-1])
    for_the_agent = {"TORCHELASTIC_SIGNALS_TO_HANDLE"}
    from_the_agent = {"TORCHELASTIC_ERROR_FILE"}
    ours = Round("127.0.0.1", 1, 0, [1], None).environment(0, "role", "run", 0)
    assert theirs.keys() - environment.keys() - for_the_agent == ours.keys() | from_the_agent
    alike = ours.keys() - {
        "MASTER_ADDR",
        "MASTER_PORT",
        "ROLE_NAME",
        "TORCHELASTIC_RUN_ID",
        "TORCHELASTIC_MAX_RESTARTS",
    }
    assert {name: theirs[name] for name in alike} == {name: ours[name] for name in alike}


def test_ranks_are_counted_over_nodes_of_any_size():
    place = Round("n0", 29500, 1, [2, 3, 1], None)
    assert list(place.ranks) == [2, 3, 4]
    said = place.environment(3, "group-0", "run", 5)
    assert (said["RANK"], said["LOCAL_RANK"], said["LOCAL_WORLD_SIZE"], said["WORLD_SIZE"]) == ("3", "1", "3", "6")
    assert (said["GROUP_RANK"], said["GROUP_WORLD_SIZE"], said["TORCHELASTIC_RESTART_COUNT"]) == ("1", "3", "5")
