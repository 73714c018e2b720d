"""One process that imports torch, torchtitan and Everstep once, and forks for every run that is asked for.

    python recipe_server.py      # a request is one JSON a line on stdin, so is an answer on stdout

{"kind": "alone", "config", "ranks", "folder"}: torchtitan's own trainer, a process a rank. Answers {losses, norms} by
step, or {error}.

{"kind": "groups", "config", "ranks", "groups", "folder", "kill": "group/rank" or ""}: as `everstep run`, but that the
launcher is a fork of this one, and that the rank `kill` dies in the middle of a backward. Answers {status}, or
{refused}: the sentence.

{"kind": "names"} and {"kind": "recipe", "suite", "name"}: what `catalog` says, which needs torchtitan.
"""

import dataclasses
import json
import os
import re
import signal
import socket
import sys
import time
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import catalog
from everstep.launch import forking, supervisor

forking.preload()

from torchtitan import trainer as titan  # noqa: E402

from everstep.launch.prepare import Order  # noqa: E402
from everstep.run.directory import LaunchError  # noqa: E402
from everstep.titan import cpu  # noqa: E402
from everstep.titan.data.binding import bind_data  # noqa: E402
from everstep.titan.data.streams import SlotStreams  # noqa: E402
from everstep.titan.load import load_config  # noqa: E402
from everstep.titan.trainer import EverstepTrainer  # noqa: E402

LONGEST_S = 1200.0
"""For a run in groups, on however slow a machine: then it loops."""


class Alone(titan.Trainer):
    """torchtitan's trainer, with what a CPU needs and no more, that keeps what it logs."""

    def __init__(self, config):
        cpu.prepare(config)
        super().__init__(config)
        cpu.sum_only_collectives(self.model_parts)
        self.said = {"losses": {}, "norms": {}}
        log = self.metrics_processor.log

        def keep(step, loss, worst, norm, **more):
            self.said["losses"][step], self.said["norms"][step] = loss, norm
            log(step, loss, worst, norm, **more)

        self.metrics_processor.log = keep


def train_alone(config, folder):
    everything = load_config(Path(config), EverstepTrainer.Config, ["--dump_folder", folder], check=False)
    bind_data(everything)
    if everything.data.source == "dataloader":
        # A stream for each slot, as groups read it; torchtitan's own split is one for each rank.
        training = everything.training
        streams = training.global_batch_size // training.local_batch_size
        everything.dataloader = SlotStreams.Config(base=everything.dataloader, streams=streams)
    fields = {f.name: getattr(everything, f.name) for f in dataclasses.fields(titan.Trainer.Config)}
    trainer = Alone(titan.Trainer.Config(**fields))
    trainer.train()
    knows = not trainer.parallel_dims.pp_enabled or trainer.pp_has_last_stage
    Path(folder, f"rank-{os.environ['RANK']}.json").write_text(json.dumps(trainer.said if knows else {}))


def forked(function, *arguments, log):
    """Fork a process that calls `function` and says what it says in `log`; its pid."""

    if pid := os.fork():
        return pid
    status = 1
    try:
        forking.redirect_output(Path(log))
        function(*arguments)
        status = 0
    except BaseException:  # noqa: BLE001  the last frame of a process
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def alone(config, ranks, folder):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    pids = {}
    for rank in range(ranks):
        os.environ |= {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo",
        }  # fmt: skip
        pids[forked(train_alone, config, folder, log=f"{folder}/rank-{rank}.log")] = rank
    failed = []
    while pids:
        pid, status = os.wait()
        rank = pids.pop(pid)
        if status:
            failed.append(rank)
            for other in pids:
                os.kill(other, 9)
    if failed:
        return {"error": last_error(Path(folder, f"rank-{failed[0]}.log"))}
    said = [json.loads(Path(folder, f"rank-{rank}.json").read_text()) for rank in range(ranks)]
    return next(answer for answer in said if answer)


def last_error(log):
    """The error that a log ends with, in a line."""
    lines = log.read_text(errors="replace").strip().splitlines() if log.exists() else []
    errors = [line for line in lines if re.match(r"(\[rank\d\]:)?(\w+\.)*\w*(Error|Exception|Failed|Refused)\b", line)]
    return (errors or lines or ["no output"])[-1]


def ends(pid):
    """Whether a supervisor ends by itself; what it started dies with it."""
    deadline = time.monotonic() + LONGEST_S
    while os.waitpid(pid, os.WNOHANG) == (0, 0):
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return False
        time.sleep(0.1)
    return True


def supervise(config, ranks, groups, folder, kill, answer):
    os.environ["EVERSTEP_TEST_KILL"] = kill
    try:
        order = Order(config, groups=groups, ranks=ranks, run_dir=folder)
        settings = supervisor.RunSettings(order, entry="mid_step_kill:main")
        found = {"status": supervisor.run(settings)}
    except LaunchError as error:
        found = {"refused": str(error)}
    Path(answer).write_text(json.dumps(found))


def in_groups(config, ranks, groups, folder, kill):
    answer = Path(f"{folder}.answer")
    answer.unlink(missing_ok=True)
    pid = forked(supervise, config, ranks, groups, folder, kill, answer, log=f"{folder}.out")
    if not ends(pid):
        return {"error": f"it had not ended after {LONGEST_S:g} s"}
    if not answer.exists():
        return {"error": last_error(Path(f"{folder}.out"))}
    return json.loads(answer.read_text())


ANSWERS = {
    "alone": alone,
    "groups": in_groups,
    "names": lambda: [f"{suite}.{name}" for suite, name in catalog.names()],
    "recipe": lambda suite, name: dataclasses.asdict(catalog.load(suite, name)),
}

if __name__ == "__main__":
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        request = json.loads(line)
        kind = request.pop("kind")
        print(json.dumps(ANSWERS[kind](**request)), file=out, flush=True)
