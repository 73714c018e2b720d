"""torchtitan's own trainer on a CPU, a fork for each rank, so that many recipes share one import.

    python titan_alone.py        # reads requests from stdin, one JSON a line: {config, ranks, folder}

Answers with one JSON a line: {losses: [...]} or {error: ...}.
"""

import dataclasses
import json
import os
import re
import socket
import sys
import traceback
from pathlib import Path

from everstep.titan import cpu

cpu.stand_in()

from torchtitan import trainer as titan  # noqa: E402
from torchtitan.models import _supported_models  # noqa: E402, F401

from everstep.config.binding import bind_data  # noqa: E402
from everstep.titan.load import load_config  # noqa: E402
from everstep.titan.trainer import EverstepTrainer  # noqa: E402


class Alone(titan.Trainer):
    """torchtitan's trainer, with what a CPU needs and no more, that keeps its losses."""

    def __init__(self, config):
        cpu.prepare(config)
        super().__init__(config)
        cpu.sum_only_collectives(self.model_parts)
        self.losses = {}
        self.norms = {}
        log = self.metrics_processor.log

        def keep(step, loss, worst, norm, **more):
            self.losses[step], self.norms[step] = loss, norm
            log(step, loss, worst, norm, **more)

        self.metrics_processor.log = keep


def train(config_path, ranks, folder):
    """One rank, to its end."""
    try:
        everything = load_config(Path(config_path), EverstepTrainer.Config, ["--dump_folder", folder], check=False)
        bind_data(everything)
        fields = {f.name: getattr(everything, f.name) for f in dataclasses.fields(titan.Trainer.Config)}
        trainer = Alone(titan.Trainer.Config(**fields))
        trainer.train()
        found = {}
        if not trainer.parallel_dims.pp_enabled or trainer.pp_has_last_stage:
            found = {"losses": trainer.losses, "norms": trainer.norms}
        Path(folder, f"rank-{os.environ['RANK']}.json").write_text(json.dumps(found))
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)


def run(config, ranks, folder):
    """All ranks; what the last stage's say."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    Path(folder).mkdir(parents=True, exist_ok=True)
    pids = {}
    for rank in range(ranks):
        pid = os.fork()
        if pid == 0:
            log = os.open(f"{folder}/rank-{rank}.log", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
            os.dup2(log, 1)
            os.dup2(log, 2)
            os.environ |= {
                "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks),
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo",
            }  # fmt: skip
            train(config, ranks, folder)
        pids[pid] = rank
    failed = -1
    while pids:
        pid, status = os.wait()
        rank = pids.pop(pid)
        if status and failed < 0:
            failed = rank
            for other in pids:
                os.kill(other, 9)
    if failed >= 0:
        lines = Path(folder, f"rank-{failed}.log").read_text().strip().splitlines()
        errors = [line for line in lines if re.match(r"(\w+\.)*\w*(Error|Exception|Refused)\b", line)]
        return {"error": (errors or lines or ["no output"])[-1]}
    said = [json.loads(Path(folder, f"rank-{rank}.json").read_text()) for rank in range(ranks)]
    [found, *_] = [answer for answer in said if answer]
    return found


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(run(**json.loads(line))), flush=True)
