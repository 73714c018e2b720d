"""torchtitan's trainer as it is, without other groups: writes the loss of each step beside CONFIG.

    python alone.py CONFIG STEPS

On the device "late" if the process has it, else on the CPU. One process, or one of those that torchrun starts.
"""

import json
import os
import sys
from pathlib import Path

ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "MASTER_PORT": "0"}


def main(path: str, steps: int) -> None:
    os.environ.update({"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo", **ALONE, **os.environ})
    from everstep.titan import cpu

    if not cpu.has_accelerator():
        cpu.stand_in()
    import torch
    from torchtitan.trainer import Trainer

    from everstep.titan.data.binding import bind_data
    from everstep.titan.load import load_config
    from everstep.titan.trainer import EverstepTrainer

    config = load_config(Path(path), EverstepTrainer.Config)
    config.fault_tolerance.enable = config.snapshot.enable = config.checkpoint.enable = False
    config.training.steps, config.dump_folder = steps, str(Path(path).parent / "dump")
    bind_data(config)
    cpu.prepare(config)
    trainer = Trainer(config)
    losses: list[float] = []
    log = trainer.metrics_processor.log

    def logged(step, loss, *args, **kwargs):
        losses.append(float(loss))
        return log(step, loss, *args, **kwargs)

    trainer.metrics_processor.log = logged
    if not cpu.has_accelerator():
        cpu.sum_only_collectives(trainer.model_parts)
    trainer.train()
    found = torch.late.races() if cpu.has_accelerator() else []
    answer = json.dumps({"device": str(trainer.device), "losses": losses, "races": found})
    (Path(path).parent / f"{trainer.device.type}-{os.environ['RANK']}.json").write_text(answer)
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
