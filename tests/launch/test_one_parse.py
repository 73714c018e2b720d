"""A run's config is read and resolved once; all processes of the run use the result."""

from dataclasses import replace

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torchtitan.config.manager import ConfigManager

from everstep.config.errors import ConfigError
from everstep.launch import prepare
from everstep.launch.prepare import Prepared, PrepareOptions
from everstep.launch.supervisor import Supervisor
from everstep.run.directory import config_file, prepared_file
from everstep.run.exits import USAGE_EXIT
from everstep.titan.imports import import_all
from watched import write_config

LLAMA = {"module": "llama3", "config": "llama3_debugmodel"}
SECTIONS = {"job": LLAMA, "training": {"global_batch_size": 4}, "fault_tolerance": {"groups": 2}}
FLAGS = ["--parallelism.data_parallel_replicate_degree", "2", "--training.steps", "7", "--snapshot.interval=3"]


@pytest.fixture
def settled(tmp_path, monkeypatch):
    """What was prepared for a run with FLAGS, in the run directory tmp_path/run."""
    monkeypatch.setenv("WORLD_SIZE", "1")
    import_all()
    write_config(tmp_path / "run.toml", **SECTIONS)
    (tmp_path / "run").mkdir()
    options = PrepareOptions(str(tmp_path / "run.toml"), FLAGS, ranks=1, run_dir=str(tmp_path / "run"), here=False)
    assert prepare.main(vars(options)) == 0
    found = prepare.read_prepared(tmp_path / "run")
    assert isinstance(found, Prepared)
    assert (found.groups, found.steps) == (2, 7)
    return found


def test_workers_do_not_apply_flags_to_what_flags_have_decided(settled, tmp_path, monkeypatch):
    monkeypatch.setattr("signal.signal", lambda *_: None)  # a supervisor's handlers
    supervisor = Supervisor(PrepareOptions(str(tmp_path / "run.toml"), ranks=1), tmp_path / "run", print)
    config = ConfigManager().parse_args(supervisor.group_settings(1, 2, settled).worker_argv)
    assert config.parallelism.data_parallel_replicate_degree == 1, "each replica became a group"
    assert (config.training.steps, config.snapshot.interval, config.debug.seed) == (7, 3, 0)
    ft = config.fault_tolerance
    assert (ft.group_id, ft.groups, ft.lighthouse, ft.bind_host) == (1, 2, "", "127.0.0.1")
    assert config.dump_folder == str(tmp_path / "run")


def test_only_the_owner_reads_files_that_may_hold_a_webhooks_address(settled, tmp_path):
    files = (config_file(tmp_path / "run"), prepared_file(tmp_path / "run"))
    assert [file.stat().st_mode & 0o777 for file in files] == [0o600, 0o600]


@pytest.mark.parametrize(("name", "flags", "ranks", "judged"), [
    ("run.toml", FLAGS, 1, 1), ("run/config.toml", [], 1, 0), ("run/config.toml", [], 2, 1),
])  # fmt: skip
def test_a_process_of_a_batch_job_takes_what_was_settled_or_settles_it(
    settled, tmp_path, monkeypatch, name, flags, ranks, judged
):
    """config.toml is prepared again only for another file or number of ranks, with the same result."""
    asked = []
    monkeypatch.setattr(prepare, "prepare_in_subprocess", lambda what: asked.append(what) or prepare.prepare(what))
    monkeypatch.setattr("everstep.titan.cpu.has_accelerator", lambda: True)
    found = prepare.read_or_prepare(tmp_path / name, tmp_path / "run", flags, ranks)
    assert (len(asked), found.groups, found.fault_tolerance) == (judged, 2, settled.fault_tolerance)


def test_a_users_own_config_is_not_overwritten_by_the_resolved_one(settled, tmp_path):
    run_dir = tmp_path / "run"
    own = PrepareOptions(str(run_dir / "config.toml"), ranks=1, run_dir=str(run_dir), here=False, together=True)
    with pytest.raises(ConfigError, match="would be overwritten by"):
        prepare.prepare(own)
    assert prepare.main(vars(own), tells=True) == USAGE_EXIT
    assert prepare.read_prepared(run_dir) == settled, "a refused one changes nothing"
    (run_dir / "events").mkdir()
    (run_dir / "events" / "group-0.rank-0.jsonl").touch()
    assert prepare.prepare(own).groups == 2, "the run's, which is the resolved one"
    (tmp_path / "again" / "checkpoint" / "step-4").mkdir(parents=True)
    gone = ["--checkpoint.enable", "--checkpoint.initial_load_path", "/gone"]
    for scaled_or_replayed in ("", str(tmp_path / "again")):
        again = PrepareOptions(own.config, gone, ranks=1, run_dir=scaled_or_replayed, here=False)
        assert prepare.prepare(again).groups == 2, "its checkpoints have what it began with"


def test_a_start_that_does_not_read_the_runs_checkpoints_is_warned(settled, tmp_path):
    for more, times in (([], 0), (["--checkpoint.folder", "new"], 1), (["--checkpoint.no-enable"], 1)):
        flags = [*FLAGS, "--checkpoint.enable", *more]
        again = PrepareOptions(str(tmp_path / "run.toml"), flags, ranks=1, run_dir=str(tmp_path / "run"), here=False)
        told = prepare.prepare(again).warnings
        assert len([text for text in told if text.endswith("it begins at step 1 again")]) == times, (more, told)


@pytest.mark.parametrize("begins", [True, False])
def test_only_a_start_of_a_run_of_which_nothing_lives_goes_back_to_a_checkpoint(settled, tmp_path, begins):
    checkpoints = tmp_path / "run" / "checkpoint"
    for step in (10, 20):
        dcp.save({"train_state.step": torch.tensor(step)}, checkpoint_id=checkpoints / f"step-{step}", no_dist=True)
    flags = [*FLAGS, "--checkpoint.enable", "--checkpoint.load_step", "10"]
    options = PrepareOptions(str(tmp_path / "run.toml"), flags, ranks=1, run_dir=str(tmp_path / "run"), here=False)
    told = prepare.prepare(replace(options, begins=begins)).warnings
    assert [text for text in told if "is newer than" in text] == told[-1:] * begins
    assert {path.name for path in checkpoints.iterdir()} == {"step-10", "abandoned-20.0" if begins else "step-20"}


def test_a_checkpoint_folder_has_to_be_writable_unless_it_is_only_read(tmp_path):
    write_config(tmp_path / "run.toml", **SECTIONS)
    flags = [*FLAGS, "--checkpoint.enable", "--checkpoint.folder", "/proc/no"]
    into = {"ranks": 1, "run_dir": str(tmp_path / "run"), "here": False, "together": True}
    with pytest.raises(ConfigError, match='folder = "/proc/no" cannot be written to: No such file'):
        prepare.prepare(PrepareOptions(str(tmp_path / "run.toml"), flags, **into))
    prepare.prepare(PrepareOptions(str(tmp_path / "run.toml"), [*flags, "--checkpoint.load_only"], **into))
