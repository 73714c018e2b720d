"""One group that makes rounds without launcher, quorum or other groups, of several configs in turn: the trainer as it
is, between calls of the step protocol that this script makes.

    python one_group.py SCENARIOS.json

Each scenario: `config` a TOML file, `dir` an empty folder, `rounds`, and `before`: round → what happens to the group
before that round:

    ["moved", worker]                   its own state is in no memory
    ["lost", worker, round]             nor on disk after this round
    ["torn", worker, round]             there it is torn
    ["healed"]                          all of the group's memory is replaced by what a joiner gets
    ["replaced"]                        another trainer goes on with that
    ["restarted"]                       another trainer goes on from a checkpoint

What came of it is in `dir`/out.pt: parameters, losses by inner step, events, after how many inner steps of its round
each sum began, and what was told of streams when a worker moved.
"""

import json
import os
import socket
import sys
import time
from datetime import timedelta
from pathlib import Path

from everstep.titan import cpu

cpu.stand_in()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402

from everstep.data.plain import decode_states  # noqa: E402
from everstep.quorum.request import Quorum  # noqa: E402
from everstep.step import ledger  # noqa: E402
from everstep.step.interfaces import Commit  # noqa: E402
from everstep.titan.data.streams import SlotStreams  # noqa: E402
from everstep.titan.load import load_config  # noqa: E402
from everstep.titan.trainer import EverstepTrainer  # noqa: E402

HOUR = timedelta(hours=1)
DEADLINE_S = 600.0
WRITTEN_S = 60.0
EVENTS, TOLD = [], []
NOBODY = Quorum(id=0, members=(), key="", step=-1, history=0, able=(), sources={})


class Alone:
    """Sums over one group."""

    ended = True
    payload_bytes = 0

    def __init__(self, trainer):
        self.inner_steps, self.begun_after = 0, []
        step = trainer.slots.step

        def counted(*args):
            self.inner_steps += 1
            return step(*args)

        trainer.slots.step = counted

    def start(self, tensor, timeout):
        self.begun_after.append(self.inner_steps)
        self.payload_bytes += tensor.nbytes
        return self

    def finish(self, one):
        pass


def written(trainer, worker, round_):
    """The file of a worker's state after a round, once it is there."""
    unit = trainer.work.unit
    path = unit.store.path(unit.state.place(worker, round_))
    deadline = time.monotonic() + WRITTEN_S
    while not path.exists():
        assert time.monotonic() < deadline, f"{path.name} is not written"
        time.sleep(0.01)
    return path


def moves_streams(trainer):
    """This group becomes one that knows of its dataloader's streams what the group before it told."""
    notes = trainer.work.notes(trainer.work.committed + 1)
    TOLD.append((trainer.step, {slot: state.position for slot, state in decode_states(notes).items()}))
    trainer.source._forget()
    trainer.source.committed(trainer.step)
    trainer.work.noted([notes])


def happens(trainer, what, scenario):
    match what:
        case ["moved", worker]:
            if trainer.work.committed:
                written(trainer, worker, trainer.work.committed)
            del trainer.work.unit.store.held[worker]
            if isinstance(trainer.source, SlotStreams):
                moves_streams(trainer)
        case ["lost", worker, round_]:
            written(trainer, worker, round_).unlink()
        case ["torn", worker, round_]:
            path = written(trainer, worker, round_)
            data = bytearray(path.read_bytes())
            data[-1] ^= 1
            path.write_bytes(data)
        case ["healed"]:
            state = fetched(trainer)
            of = trainer.work.unit.state
            for tensor in (*of.trained, *of.momentum, *of.live, *of.balances, *of._balances.values()):
                with torch.no_grad():
                    tensor.zero_()
            of.marks = {}
            trainer.work.unit.store.held.clear()
            trainer.step = 0
            trainer.work.heal(state)
        case ["replaced"]:
            state = fetched(trainer)
            end(trainer)
            trainer = begin(scenario)
            trainer.work.heal(state)
        case ["restarted"]:
            trainer.work.save_last()
            end(trainer)
            trainer = begin(scenario)
            trainer.work.restore(NOBODY)
        case _:
            raise ValueError(what)
    return trainer


def fetched(trainer):
    """What a joiner gets, through the group's own door, when all states are written."""
    for worker in range(trainer.work.unit.shares) if trainer.work.committed else ():
        written(trainer, worker, trainer.work.committed)
    door = trainer.participation.door
    door.serve(trainer.work.committed, trainer.history, trainer.work.serve())
    fetch = door.fetch(door.address, trainer.work.committed, trainer.history)
    while (state := fetch.state()) is None:
        assert not fetch.error, fetch.error
        time.sleep(0.01)
    door.close()
    return state


def whole(tensor):
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def begin(scenario):
    """A trainer without a state."""
    config = load_config(Path(scenario["config"]), EverstepTrainer.Config)
    config.dump_folder = scenario["dir"]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        os.environ["MASTER_PORT"] = str(free.getsockname()[1])
    trainer = config.build()
    trainer.column = Alone(trainer)
    emit = trainer.events.emit

    def told(kind, step=None, **fields):
        EVENTS.append({"kind": kind, "step": step, **fields})
        return emit(kind, step, **fields)

    trainer.events.emit = told
    return trainer


def end(trainer):
    trainer.close()
    dist.destroy_process_group()


def run(scenario):
    EVENTS.clear()
    TOLD.clear()
    trainer = begin(scenario)
    _, history = trainer.work.restore(NOBODY)
    workers, begun = trainer.work.unit.shares, []
    for round_ in range(1, scenario["rounds"] + 1):
        for what in scenario.get("before", {}).get(str(round_), ()):
            trainer = happens(trainer, what, scenario)
        sums = trainer.column
        sums.begun_after.clear()
        trainer.work.unit.reducer.begin(sums, HOUR, round_)
        for worker in range(workers):
            sums.inner_steps = 0
            trainer.work.unit.reducer.begin_slot(last=worker == workers - 1)
            trainer.work.compute(round_, worker, whole=False)
            trainer.work.unit.reducer.end_slot()
        trainer.work.unit.reducer.finish()
        begun.append(sorted(set(sums.begun_after)))
        parent, history = history, ledger.extend(history, round_, "alone")
        of = trainer.work.results()
        trainer.work.apply(
            Commit(
                step=round_, history=history, parent=parent, tokens=of.tokens, loss=of.loss, extra=of.extra,
                owners=(0,) * workers, groups=(0,),
                able=(0,), once=True, saver=-1, all_leave=False, unfit=(), quorum_id=0,
                attempts=1, compute_s=0.0, reduce_s=0.0, took_s=0.0,
            )
        )  # fmt: skip
        trainer.work.discard()
    parameters = {name: whole(t) for part in trainer.model_parts for name, t in part.state_dict().items()}
    losses = [loss for event in EVENTS if event["kind"] == "commit" for loss in event["inner_losses"]]
    torch.save(
        {"parameters": parameters, "losses": losses, "events": list(EVENTS), "begun": begun, "told": list(TOLD)},
        Path(scenario["dir"]) / "out.pt",
    )
    end(trainer)


if __name__ == "__main__":
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    for one in json.loads(Path(sys.argv[1]).read_text()):
        run(one)
    os._exit(0)
