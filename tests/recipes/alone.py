"""A worker's entry: torchtitan's own trainer, which leaves its losses by step in losses.json of the run directory."""

import dataclasses
import json
import sys
from pathlib import Path

from torchtitan import trainer as titan
from torchtitan.components.dataloader import BaseDataLoader

from everstep.titan import cpu, cpu_attention
from everstep.titan.data.binding import bind_data
from everstep.titan.load import load_config
from everstep.titan.trainer import EverstepTrainer


class Streams(BaseDataLoader):
    """A dataloader for each slot, as groups read it, in turn; torchtitan's own split is one for each rank."""

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        base: BaseDataLoader.Config
        streams: int

    def __init__(self, config, *, dp_rank, dp_world_size, **place):
        numbers = range(dp_rank, config.streams, dp_world_size)
        self._loaders = [config.base.build(dp_rank=k, dp_world_size=config.streams, **place) for k in numbers]

    def __iter__(self):
        for batches in zip(*self._loaders, strict=False):
            yield from batches

    def state_dict(self):
        return {}

    def load_state_dict(self, state_dict):
        pass


class Alone(titan.Trainer):
    """torchtitan's trainer, with what a CPU needs and no more, that keeps what it logs."""

    def __init__(self, config):
        cpu_attention.prepare(config)
        super().__init__(config)
        cpu.sum_only_collectives(self.model_parts)
        self.losses = {}
        log = self.metrics_processor.log

        def keep(step, loss, worst, norm, **more):
            self.losses[step] = loss
            log(step, loss, worst, norm, **more)

        self.metrics_processor.log = keep


def main():
    config, folder = (sys.argv[sys.argv.index(flag) + 1] for flag in ("--config", "--dump_folder"))
    everything = load_config(Path(config), EverstepTrainer.Config, ["--dump_folder", folder], check=False)
    bind_data(everything)
    if everything.data.source == "dataloader":
        training = everything.training
        streams = training.global_batch_size // training.local_batch_size
        everything.dataloader = Streams.Config(base=everything.dataloader, streams=streams)
    fields = {f.name: getattr(everything, f.name) for f in dataclasses.fields(titan.Trainer.Config)}
    trainer = Alone(titan.Trainer.Config(**fields))
    trainer.train()
    if trainer.losses and (not trainer.parallel_dims.pp_enabled or trainer.pp_has_last_stage):
        Path(folder, "losses.json").write_text(json.dumps(trainer.losses))
