"""Carries orders out in processes that die of them; prints how far each came.

python dying_worker.py FOLDER
"""

import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace

from everstep.titan import cpu

cpu.stand_in()

from everstep.quorum.process_group import RankColumn  # noqa: E402
from everstep.run.files import order_file, write_json  # noqa: E402
from everstep.titan.worker_faults import WorkerFaults  # noqa: E402

STEPS = 5
"""Of a round."""


def worker(run_dir, group, fault, at, does, identity=""):
    """A process that gets this order and then does something; the signal it died of, and the events it told."""
    read, write = os.pipe()
    if not (child := os.fork()):
        trainer = SimpleNamespace(
            files=SimpleNamespace(beat=lambda *_: None),
            events=SimpleNamespace(emit=lambda *what, **fields: os.write(write, f"{what} {fields}\n".encode())),
            config=SimpleNamespace(fault_tolerance=SimpleNamespace(group_id=group)),
            checks=None,
            round_steps=STEPS,
            carries=lambda of: of % 2 == 0,
            compute=lambda *_: None,
            inner_step=lambda *step: os.write(write, f"{step}\n".encode()),
        )
        start, faults = RankColumn.start_on, WorkerFaults(trainer, run_dir, group, 0)
        order = {"id": identity or fault, "fault": fault, "at": at, "deadline": time.time() + 600, "duration_s": 0.0}
        write_json(order_file(run_dir, group), order)
        while not faults._pending and RankColumn.start_on is start:
            time.sleep(0.01)
        does(trainer, write)
        os._exit(0)
    os.close(write)
    said = os.fdopen(read).read()
    _, status = os.waitpid(child, 0)
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0, said


def rounds(trainer, _, workers=(0, 1)):
    for one in workers:
        trainer.compute(3, one)
        for step in range(2 * STEPS + 1, 3 * STEPS + 1):
            trainer.inner_step(3, step, one)


def sums(_, write):
    column = SimpleNamespace()
    for which in (0, 0, -1, -1):
        RankColumn.start_on(column, which, None, None)


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    print(worker(folder, 0, "kill-mid-round", "half-round", rounds))
    print(worker(folder, 1, "kill-adopter", "adopt", rounds, "one order"))
    print(worker(folder, 2, "kill-adopter", "adopt", rounds, "one order"))

    def begun(column, which, *_):
        os.write(begun.pipe, f"sum on {which}\n".encode())

    def recorded(trainer, write):
        begun.pipe = write
        sums(trainer, write)

    RankColumn.start_on = begun
    print(worker(folder, 3, "kill-during-sum", "", recorded))
