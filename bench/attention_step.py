"""What the attention check costs a whole step: torchtitan's Llama 3 debug model, checked and not, taking turns.

    python bench/attention_step.py --rounds 30

Each round is a step of every variant: its slots forward and backward, and AdamW. One thread, processor time; ratios are
those of `attention_cost.py`, quartiles those of all rounds. What is between groups is left out: the ratio is the
check's own.
"""

import argparse
import json
import statistics
import time

import torch

from attention_cost import over_cycle, whole_cycles
from everstep.titan import cpu

cpu.stand_in()

from torchtitan.config import TrainingConfig  # noqa: E402
from torchtitan.config.override import apply_overrides  # noqa: E402
from torchtitan.models import llama3  # noqa: E402
from torchtitan.trainer import Trainer  # noqa: E402

from everstep.attention.section import AttentionCheck  # noqa: E402
from everstep.titan import attention  # noqa: E402

VARIANTS = {
    "unchecked": AttentionCheck(),
    "rate 0": AttentionCheck(enable=True, frequency=0.0),
    "adaptive": AttentionCheck(enable=True),
    "rate 1": AttentionCheck(enable=True, frequency=1.0),
}


class Model:
    """The debug model and its optimizer."""

    def __init__(self, section: AttentionCheck, length: int, rows: int) -> None:
        torch.manual_seed(0)
        spec = llama3.model_registry("debugmodel")
        training = TrainingConfig(seq_len=length, local_batch_size=rows, disable_cuda_graphs=True)
        config = Trainer.Config(model_spec=spec, training=training)
        cpu.prepare(config)
        attention.apply(config, section)
        spec.model.update_from_config(config=config)
        apply_overrides(config.override, config)
        self.model = spec.model.build()
        self.model.init_weights(buffer_device=torch.device("cpu"))
        self.vocabulary = spec.model.vocab_size
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.checks = attention.attach([self.model], section) if section.enable else None

    def step(self, number: int, slots: list[torch.Tensor]) -> float:
        """A step; its processor time."""
        begin = time.process_time()
        for slot, tokens in enumerate(slots):
            if self.checks is not None:
                self.checks.begin(number, slot)
            logits = self.model(tokens[:, :-1])
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
            loss.backward()
            if self.checks is not None and (self.checks.refused() or self.checks.drain()):
                raise AssertionError("an alarm on clean data")
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.checks is not None:
            self.checks.committed()
        return time.process_time() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--slots", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=30)
    args = parser.parse_args()
    torch.set_num_threads(1)
    models = {name: Model(section, args.length, args.rows) for name, section in VARIANTS.items()}
    seconds: dict[str, list[float]] = {name: [] for name in models}
    for number in range(1, whole_cycles(args.rounds) + 4):
        size = (args.rows, args.length + 1)
        slots = [torch.randint(0, models["unchecked"].vocabulary, size) for _ in range(args.slots)]
        for name, model in models.items():
            took = model.step(number, slots)
            if number > 3:
                seconds[name].append(took)
    ratios = {
        name: [mine / theirs for mine, theirs in zip(values, seconds["unchecked"], strict=True)]
        for name, values in seconds.items()
    }
    told = {
        name: {
            "seconds": round(statistics.median(seconds[name]), 4),
            "ratio": round(over_cycle(values), 4),
            "quartiles": [round(x, 4) for x in statistics.quantiles(values, n=4)[::2]],
        }
        for name, values in ratios.items()
    }
    print(json.dumps({"rounds": args.rounds, "plan": models["adaptive"].checks.news(), **told}))


if __name__ == "__main__":
    main()
