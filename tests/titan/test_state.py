"""The state that heals and snapshots carry, and the checkpoints that a run resumes from."""

import errno
import os
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st

from everstep.config.errors import ConfigError
from everstep.data.plain import StreamState, decode_states, encode_states
from everstep.quorum.heal import HealState
from everstep.run import fence
from everstep.run.directory import finished_file, finished_step
from everstep.run.exits import TrainerEnds
from everstep.run.files import write_json
from everstep.run.token import run_token
from everstep.snapshot import sources
from everstep.snapshot.segment import run_id
from everstep.step.interfaces import Commit
from everstep.titan import load_once, rounds, run_files
from everstep.titan.disk import OURS, DiskCheckpoints
from everstep.titan.load_once import Choice, choose
from everstep.titan.names import TRAIN_STATE, CheckpointManager
from everstep.titan.rounds import Rounds
from everstep.titan.slot_computer import SlotComputer
from everstep.titan.snapshots import Snapshots
from everstep.titan.state import TrainingState, slot_seed
from everstep.titan.steps import Steps
from everstep.titan.trainer import EverstepTrainer
from everstep.titan.work import TrainerWork

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def of_a_model():
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2))
    optimizers = [torch.optim.AdamW(model.parameters())]
    return model, TrainingState(SimpleNamespace(model_parts=[model], optimizers=optimizers, lr_schedulers=None))


@given(st.integers(0, 5), st.integers(0, 31), st.integers(0, 7))
def test_any_flipped_bit_changes_the_checksum(index, bit, place):
    model, state = of_a_model()
    before = state.checksum()
    with torch.no_grad():
        words = list(model.parameters())[index].view(torch.int32).flatten()
        words[place % len(words)] ^= 1 << bit if bit < 31 else -(1 << 31)
    assert state.checksum() != before
    assert 0 <= before < 2**63


def test_another_models_state_is_refused():
    _, state = of_a_model()
    tensors = {name.replace("0.weight", "9.weight"): tensor for name, tensor in state.tensors().items()}
    with pytest.raises(ValueError, match="another model"):
        state.load(HealState(tensors=tensors, meta={}, blobs={}))


def test_every_slot_of_every_step_has_random_numbers_of_its_own():
    seeds = {slot_seed(0, step, slot, rank) for step in range(20) for slot in range(-1, 12) for rank in range(3)}
    assert len(seeds) == 20 * 13 * 3
    assert slot_seed(0, 7, 3, 1) == slot_seed(0, 7, 3, 1) != slot_seed(1, 7, 3, 1)
    SlotComputer._seed(MagicMock(seed=0, **{"source.dp_rank": 1, "_trainer.device.type": "cpu"}), 7, 3)
    drawn = torch.rand(4)
    torch.manual_seed(slot_seed(0, 7, 3, 1))
    assert torch.equal(drawn, torch.rand(4))


def test_a_snapshot_is_shared_among_the_groups_that_have_the_state():
    """A group that is still healing has no part to give, and the snapshot could not be restored without that part."""
    one, fields = MagicMock(), dict.fromkeys(Commit.__dataclass_fields__, 0)
    Snapshots.committed(one, Commit(**fields | {"groups": (0, 1, 2), "able": (0, 2)}), {}, dict)
    (told,) = one.copier.committed.call_args_list
    assert told.args[2] == (0, 2)


def test_a_part_of_a_workers_state_that_another_rank_has_no_copy_of_is_told_of_by_the_first(monkeypatch):
    one, lost = MagicMock(_risk="", shares=1), "the host of group 7 is lost"
    one.store.begin_writes.return_value = ""
    monkeypatch.setattr(rounds, "gather_json", lambda mine: [mine, ["no room", lost]])
    Rounds._keep(one, 3)
    one._events.emit.assert_called_once_with("workers_unprotected", 3, reason="no room", risk=lost)


@pytest.mark.parametrize("source", ["disk", "memory"])
def test_a_run_that_turns_to_other_data_reads_it_from_its_beginning_once(source):
    """Only once, however often it is started again. In the same run and with the same data, the key alone does it."""
    work, trainer = MagicMock(), MagicMock()
    work._from_memory.return_value = source.removeprefix("disk")
    work._disk.choice.asks = False
    trainer.context.token, trainer.config.checkpoint.exclude_from_loading = b"token", []
    told = EverstepTrainer.data.fget(trainer)
    trainer.config.checkpoint.exclude_from_loading = ["dataloader"]
    work._trainer.configure_mock(data=EverstepTrainer.data.fget(trainer), parameters_told="", config=trainer.config)
    for step, before in ((90, "of other data"), (100, told)):
        work._trainer.configure_mock(step=step, data_told=before)
        Steps.restore(work, None)
        work._source.begin_after.assert_called_with(step)
    work._trainer.configure_mock(step=130, data_told=work._trainer.data)
    Steps.restore(work, None)
    work._source.begin_after.assert_called_with(100)  # a later start goes on with the rows that come then


def test_a_run_that_goes_back_behind_its_last_end_is_saved_where_it_ends_next(tmp_path, monkeypatch):
    """Its last checkpoint was removed, or the user chose an older one. What another group has saved since counts."""
    monkeypatch.setattr(run_files.signal, "signal", lambda *said: None)

    def start(rank=0):
        return run_files.RankFiles(tmp_path, 0, rank, steps=100, stall_timeout_s=1.0)

    def restored(files):
        disk = MagicMock(**{"choice.asks": False})
        Steps.restore(MagicMock(_files=files, _disk=disk, _snapshots=None, committed=20), None)

    start().mark_finished(26, for_all=True)
    ranks = start(), start(1)
    for files in ranks:
        restored(files)
    assert ranks[1].finished_step() == 20
    ranks[0].mark_finished(30, for_all=True)
    restored(ranks[1])
    assert ranks[1].finished_step() == 30


def test_an_outage_of_the_run_directory_ends_no_rank(tmp_path, monkeypatch):
    monkeypatch.setattr(run_files.signal, "signal", lambda *said: None)
    monkeypatch.setenv(fence.ENVIRONMENT, str(fence.Claim("1", 0, 0)))
    files = run_files.RankFiles(tmp_path, 0, 0, steps=100, stall_timeout_s=1.0)
    files.beat("compute", 3)

    def away(*args, **kwargs):
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as outage:
        for name in ("open", "stat", "pwrite", "scandir", "listdir"):
            outage.setattr(os, name, away)
        files.beat("compute", 4)
        asks = files.asked_to_leave, files.fenced, files.is_over, files.ended_for_all
        assert not any(ask() for ask in asks)
        assert (files.finished_step(), files.why_run_ended()) == (-1, "")


def checkpoint_of(folder, *keys):
    dcp.save({key: torch.tensor(7) for key in keys}, checkpoint_id=str(folder), no_dist=True)
    return folder


def disk_at(folder, **checkpoint):
    """A `DiskCheckpoints` whose `asked` lists the step and our own keys of each load by torchtitan's manager."""
    disk = DiskCheckpoints.__new__(DiskCheckpoints)
    disk.asked, disk.states = [], {}
    settings = {"load_step": -1, "exclude_from_loading": [], "initial_load_path": None, "initial_load_model_only": True}
    disk._config = SimpleNamespace(enable=True, **settings | checkpoint)
    disk._config.folder, disk.choice = ".", Choice(disk._config, folder)
    (folder / "state").mkdir(parents=True, exist_ok=True)
    source = SimpleNamespace(state_dict=lambda: {"rows_read": 0}, saved_ranks=())
    disk._manager, disk._trainer = CheckpointManager.__new__(CheckpointManager), SimpleNamespace(own_keys=OURS)
    disk._trainer.dataloader, disk._trainer.data_told = source, ""
    disk._trainer.context = SimpleNamespace(run_dir=folder, token=b"ours")
    disk._manager.enable, disk._manager.folder = False, str(folder)
    disk._damaged = {}
    disk._manager.load = lambda step: disk.asked.append((step, disk._trainer.own_keys)) or True
    return disk


@pytest.mark.parametrize("only_weights", [False, True])
def test_a_whole_checkpoint_of_torchtitans_is_not_asked_for_what_it_lacks(tmp_path, only_weights):
    """Also one that a run begins with (`initial_load_path`). If only its weights are loaded, it is not inspected."""
    begin = checkpoint_of(tmp_path / "begin", f"{TRAIN_STATE}.step", "dataloader.dp_rank_0")
    of_it = {"initial_load_path": str(begin), "initial_load_model_only": only_weights}
    if not only_weights:
        with pytest.raises(TrainerEnds, match=r'has no position for .* exclude_from_loading = \["dataloader"\]'):
            disk_at(tmp_path / "none", **of_it).load()
    disk = disk_at(tmp_path / "none", **of_it, exclude_from_loading=["dataloader"])
    disk.load()
    assert (disk.asked, disk._trainer.own_keys) == ([(-1, OURS if only_weights else set())], OURS)


def test_a_run_whose_end_left_the_model_alone_goes_on_from_the_checkpoint_before(tmp_path, monkeypatch):
    """With more steps, or if all groups died before the end was noted. Without an older checkpoint it is refused."""
    keys = f"{TRAIN_STATE}.step", f"{TRAIN_STATE}.history", "dataloader.rows_read"
    before = checkpoint_of(tmp_path / "step-10", *keys)
    checkpoint_of(tmp_path / "step-15", "model.w")
    disk, told = disk_at(tmp_path), []
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    disk._events = SimpleNamespace(emit=lambda kind, text: told.append(text))
    disk.load()
    assert told[0].startswith(f"the run goes on from step 10 and makes later steps again, as {tmp_path}/step-15 has")
    assert (disk.asked, disk_at(tmp_path, exclude_from_loading=[TRAIN_STATE]).newest()) == ([(10, {"history"})], 15)
    disk._trainer.data_told, disk._trainer.context.run_dir = "their-id data", tmp_path / "run"
    disk.load()
    assert "trains on from another run's checkpoint" in told[-1]
    before.rename(tmp_path / "step-20.kept")
    with pytest.raises(TrainerEnds, match="step-15 has the model only"):
        disk_at(tmp_path).load()
    (tmp_path / "step-16").mkdir()
    (tmp_path / "step-16" / "model.safetensors.index.json").touch()
    with pytest.raises(TrainerEnds, match="step-16 has the model only"):
        disk_at(tmp_path).load()


def test_a_checkpoint_whose_metadata_is_cut_off_is_passed_over(tmp_path, monkeypatch):
    """The host lost power during the write. Without an older checkpoint the run is refused, and the file named."""
    names = f"{TRAIN_STATE}.step", "dataloader.rows_read"
    before, cut = (checkpoint_of(tmp_path / f"step-{step}", *names) for step in (10, 15))
    os.truncate(cut / ".metadata", 40)
    disk, told = disk_at(tmp_path), []
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    disk._events = SimpleNamespace(emit=lambda kind, text: told.append((kind, text)))
    disk.load()
    assert [step for step, _ in disk.asked] == [10]
    assert told == [("warning", f"the run goes on from step 10, as files of {cut} are damaged")]
    os.truncate(next(before.glob("*.distcp")), 40)
    disk._manager.load = lambda step: dcp.load({names[0]: torch.tensor(0)}, checkpoint_id=str(before), no_dist=True)
    with pytest.raises(OSError, match=r"step-10 cannot be read: RuntimeError: .* rename it to abandoned-10"):
        disk.load()
    before.rename(tmp_path / "step-10.kept")
    with pytest.raises(TrainerEnds, match=r"step-15 has a damaged \.metadata"):
        disk_at(tmp_path).load()


@pytest.mark.parametrize("excludes", [[], ["optimizer", "dataloader"]])
def test_a_run_goes_back_to_a_chosen_checkpoint_once(tmp_path, excludes):
    """If all groups die again and again, it goes on from what they had committed. What it left is kept."""
    keys = f"{TRAIN_STATE}.step", "dataloader.rows_read"
    with pytest.raises(ConfigError, match="has no checkpoints"):
        choose(disk_at(tmp_path, load_step=10)._config, tmp_path)
    for step in (10, 20):
        checkpoint_of(tmp_path / f"step-{step}", *keys)
    checkpoint_of(tmp_path / "step-5", "model.w")
    (tmp_path / "step-7").mkdir()  # was being removed when the run died
    asks, token = {"load_step": 10, "exclude_from_loading": excludes}, run_token(tmp_path)
    write_json(finished_file(tmp_path), {"step": 20, "for_all": True})
    (tmp_path / f"writing-trainer-0-{run_id(token)}-life").mkdir()

    def begin(**checkpoint):
        return choose(disk_at(tmp_path, **checkpoint)._config, tmp_path)

    def loaded():
        disk = disk_at(tmp_path, **asks)
        disk.load()
        return disk.asked[0][0], disk._manager.exclude_from_loading

    why = {
        11: r"has no step-11, only step-5, .*step-20",
        5: "step-5 has the model only",
        7: r"step-7 has no \.metadata",
    }
    for step, said in why.items():
        with pytest.raises(ConfigError, match=said):
            begin(load_step=step)
    assert (tmp_path / "step-20").exists(), "a refusal changes nothing"
    assert disk_at(tmp_path, **asks).choice.asks, "torchrun alone does not choose"
    [said] = begin(**asks)
    assert said.endswith("step-20 is newer than [checkpoint] load_step: it is now abandoned-20.0")
    assert run_token(tmp_path) != token, "snapshots in memory are of another run"
    assert finished_step(tmp_path) == 10, "the run is not over any more"
    assert not [*tmp_path.glob("writing-*")], "nobody else knows the drafts of the old id"
    assert loaded() == (10, excludes), "also if all die before the next checkpoint"
    checkpoint_of(tmp_path / "step-15", *keys)
    assert (begin(**asks), loaded(), begin()) == ([], (15, excludes[1:]), [])
    assert [said.rpartition(" ")[2] for said in begin(**asks)] == ["abandoned-15.0"], "it was not asked to in between"


@pytest.mark.parametrize("excludes", ["optimizer", TRAIN_STATE])
def test_nothing_is_left_out_of_a_checkpoint_if_that_would_lose_steps(tmp_path, monkeypatch, excludes):
    config = disk_at(tmp_path, exclude_from_loading=[excludes])._config
    newest = sources.Decision("memory", 24)
    run_token(tmp_path)
    (tmp_path / "step-20").mkdir()
    monkeypatch.setattr(load_once, "ask_keepers", lambda *args, **kwargs: newest)
    with pytest.raises(ConfigError, match=r"memory has the state of step 24|without train_state the run would begin"):
        choose(config, tmp_path)
    newest = sources.Decision("memory", 20)
    if excludes == "optimizer":
        assert (choose(config, tmp_path), Choice(config, tmp_path).begun) == ([], 20)


def test_what_a_group_of_another_version_says_of_its_streams_is_skipped():
    told, learnt = [], []
    source = SimpleNamespace(learn=lambda note: learnt.append(decode_states(note)))
    events = SimpleNamespace(emit=lambda kind, **fields: told.append((kind, fields["text"])))
    streams = {3: StreamState(5, {})}
    group = SimpleNamespace(_source=source, _events=events)
    TrainerWork.receive_notes(group, [b"", b"EVERSTREAM-NEWER[]", encode_states(streams)])
    assert learnt == [{}, streams]
    [(kind, text)] = told
    assert (kind, text.partition(":")[0]) == ("warning", "stream positions of member 2 of 3 of the quorum are skipped")
