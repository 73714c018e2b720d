"""`everstep chaos` on a run of a real Slurm."""

import time

import pytest

from everstep.chaos.cluster import find_target
from everstep.run.directory import LaunchError

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

CAMPAIGN = """
[[fault]]
name = "kill-worker"
at_step = 2
group = 0
[[fault]]
name = "kill-agent"
at_step = 2
group = 1
patience_s = 300
[[fault]]
name = "stop-worker"
at_step = 2
group = 2
duration_s = 2.0
patience_s = 300
[[fault]]
name = "kill-lighthouse"
at_step = 2
"""


def test_workers_steps_and_lighthouse_of_a_slurm_run_are_hit_and_nothing_is_lost(submit, tmp_path):
    run = submit()
    run.wait_for_step((0, 1, 2))
    path = tmp_path / "campaign.toml"
    path.write_text(CAMPAIGN)
    begin = time.time()
    said = run.everstep("chaos", run.run_dir, "--campaign", path)
    assert "4 faults" in said, said
    assert "rank 0 was killed by SIGKILL" in run.wait_for("workers_died", after=begin, group=0)["reason"]
    assert run.wait_for("agent_up", after=begin, group=1)["restart"] == 1
    run.wait_for("fault_undone", after=begin, target_group=2)
    run.wait_for("lighthouse_died", after=begin)
    run.wait_for_step((0, 1, 2), after=time.time())
    refused = run.everstep("chaos", run.run_dir, "--every", "5", "--faults", "kill-host", check=False)
    assert "cannot be done to a run on slurm, only on local" in refused
    run.assert_as_without_failures()
    with pytest.raises(LaunchError, match="is over"):
        find_target(run.run_dir)
