"""A checkpoint folder on a file system that is full."""

import subprocess

from watched import Watched, write_config


def test_a_checkpoint_that_does_not_fit_costs_nothing_but_itself(mount, tmp_path):
    disk = mount("disk", "1m")
    config = write_config(
        tmp_path / "full.toml",
        training={"steps": 16},
        checkpoint={"interval": 4, "folder": str(disk / "checkpoint")},
        fault_tolerance={"groups": 2},
    )
    run = Watched(config, tmp_path / "run")
    try:
        run.wait_for("commit", step=5)
        subprocess.run(["mount", "-o", "remount,size=1g", disk], check=True)
        assert run.wait() == 0, run.said()
    finally:
        run.end()
    assert not run.events("workers_died")
    assert 4 not in {event["step"] for event in run.events("checkpoint_saved")}
    logs = "".join(path.read_text() for path in (run.run_dir / "logs").glob("group-*/rank-0.log"))
    assert f"No checkpoint in {disk / 'checkpoint'} of step 4: " in logs
    (failed,) = run.events("checkpoint_failed")
    assert f"make room in {disk / 'checkpoint'}" in run.said()
    assert "The checkpoint of step 4 was not written: " in run.said()
    assert "(0.00 GiB free there)" in failed["reason"]
    assert (disk / "checkpoint" / "step-16" / ".metadata").exists()
