"""A real run dies whole and is started again: it goes on from memory as if nothing had happened."""

import os
import signal

import pytest

from snapshot_runs import STEPS, Run, end

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
RANKS_2 = ["--groups", "2", "--training.mixed_precision_param", "float32", "--ranks-per-group", "2"]


@pytest.mark.parametrize(
    ("flags", "lost", "keepers", "sources"),
    [
        ([], 0, True, {"memory", "older"}),
        ([], 0, False, {"memory", "older"}),
        (["--snapshot.parity", "1"], 1, True, {"parity"}),
        (["--snapshot.parity", "2"], 2, True, {"parity"}),
        (RANKS_2, 0, True, {"memory", "older", "parity"}),
    ],
    ids=["all trainers", "keepers too", "a host", "two hosts", "sharded"],
)
def test_everything_killed_at_once_goes_on_from_memory(tmp_path, flags, lost, keepers, sources):
    reference, run = Run(tmp_path, "reference", flags), Run(tmp_path, "run", flags)
    reference.start()
    assert reference.process.wait() == 0
    try:
        run.start()
        run.until(6)
        run.kill_all_but_keepers()
        run.lose_hosts(lost)
        for place in run.places() if not keepers else ():
            os.kill(place.pid, signal.SIGKILL)
        last = max(run.commits())
        run.start()
        assert run.process.wait() == 0
        recovered = run.recoveries()
        assert {event["rank"] for event in recovered} == ({0, 1} if flags == RANKS_2 else {0})
        assert {event["source"] for event in recovered} <= sources
        assert min(event["restored_step"] for event in recovered) >= last - 10, (
            "an interval and a coding, on a busy machine"
        )
        losses = {step: event["loss"] for step, event in run.commits().items()}
        assert len(losses) == STEPS
        assert losses == pytest.approx({step: event["loss"] for step, event in reference.commits().items()}, abs=1e-4)
        assert run.places() == [], "a complete run leaves no keeper"
    finally:
        end(run)


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_groups_of_another_number_of_ranks_go_on_from_memory(tmp_path, before, after):
    flags = [*RANKS_2[:4], "--lr_scheduler.total_steps", "10000"]
    run = Run(tmp_path, "run", [*flags, "--steps", "10000", "--ranks-per-group", str(before)])
    try:
        run.start()
        run.until(6)
        run.kill_all_but_keepers()
        last = max(run.commits())
        run.flags = [*flags, "--steps", str(last + 4), "--ranks-per-group", str(after)]
        run.start()
        assert run.process.wait() == 0
        recovered = run.recoveries()
        assert {event["rank"] for event in recovered} == set(range(after))
        assert min(event["restored_step"] for event in recovered) >= last - 10
        assert sorted(run.commits()) == list(range(1, last + 5))
        # Tensor by tensor it is tested elsewhere; here that training goes on from it and not from the beginning.
        losses = {step: event["loss"] for step, event in run.commits().items()}
        resumed = min(event["restored_step"] for event in recovered) + 1
        assert losses[resumed] < (losses[1] + losses[resumed - 1]) / 2
    finally:
        end(run)


def test_a_run_without_room_for_snapshots_trains_and_says_so(tmp_path):
    """As with the 64 MB of /dev/shm that Docker gives."""
    run = Run(tmp_path, "run", ["--groups", "2", "--snapshot.memory_reserve_gb", "1e6", "--steps", "8"])
    try:
        run.start()
        run.until(4)
        unprotected = "UNPROTECTED: no snapshot is coded"
        assert unprotected in run.says("status")
        assert "was not taken: snapshots need" in run.says("status")
        assert run.process.wait() == 0
        assert "was not taken: snapshots need" in run.console()
        assert unprotected in run.console(), "the summary at the end"
        assert unprotected in run.says("report")
        assert "UNPROTECTED" in (run.dir / "report.html").read_text()
    finally:
        end(run)
