"""Does training go on undisturbed when attention goes wrong? The Llama 3 debug model, one error every second
step.

    python bench/attention_training.py --steps 60 --kinds nan,inf,near-inf --json RESULT.json
    python bench/attention_training.py --steps 60 --path fused --compile

Trains the same model on the same batches without errors, with one injected error every `--every` steps and
checks, and with the same errors and no check; prints the largest difference of the loss to the first. Errors in whose
step nothing was found are injected once more, alone and with no check: what they do to the loss says whether they
were missed or did no harm. With --compile every block is compiled, as torchtitan does it, and the same errors are put
into a run in eager mode, to compare what is found. Wrong scores inside the kernel can be put into eager mode alone.
"""

import argparse
import json
import os
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from everstep.titan import cpu

if not cpu.has_accelerator():
    cpu.stand_in()

import torch
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.config import CompileConfig, TrainingConfig
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.models.common.config_utils import decoder_vocab_size
from torchtitan.models.llama3 import model_registry
from torchtitan.trainer import Trainer

from everstep.attention.fused import SCORES
from everstep.attention.injection import Injector
from everstep.attention.section import AttentionCheck, Inject
from everstep.titan import attention as override
from everstep.titan.data.byte_tokenizer import ByteTokenizer
from everstep.titan.data.stdlib_text import StdlibText


class CheckedTrainer(Trainer):
    """torchtitan's trainer with the attention check around each slot."""

    def __init__(self, config: Trainer.Config, section: AttentionCheck) -> None:
        if section.path == "fused" and not cpu.has_accelerator():
            cpu.prepare(config)
        override.apply(config, section)
        super().__init__(config)
        cpu.sum_only_collectives(self.model_parts)
        self.checks = override.attach(self.model_parts, section) if section.enable else None
        self.losses: list[float] = []
        self.again = 0

    def forward_backward_step(self, **batch) -> torch.Tensor:
        """One slot; here a step is one slot, so computing it again means dropping its gradient."""
        if self.checks is None:
            loss = super().forward_backward_step(**batch)
        else:
            while True:
                self.checks.begin(len(self.losses) + 1, 0)
                loss = super().forward_backward_step(**batch)
                if not self.checks.refused():
                    break
                if reason := self.checks.judge(0, alone=True).reason:
                    raise RuntimeError(reason)
                self.optimizers.zero_grad()
                self.again += 1
            self.checks.committed()
        self.losses.append(loss.item())
        return loss


def config(folder: str, steps: int, checkpointing: str, compiled: bool = False) -> Trainer.Config:
    """The debug model on the standard library's sources: 2 rows of 128 bytes a step."""
    spec = model_registry("debugmodel")
    return Trainer.Config(
        dump_folder=folder,
        loss=CrossEntropyLoss.Config(global_vocab_size=decoder_vocab_size(spec)),
        model_spec=spec,
        tokenizer=ByteTokenizer.Config(),
        dataloader=StdlibText.Config(shuffle=True, seed=0),
        optimizer=default_adamw(lr=8e-4),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=2),
        training=TrainingConfig(local_batch_size=2, seq_len=128, steps=steps, disable_cuda_graphs=True),
        compile=CompileConfig(enable=compiled, components=["model"]),
        metrics=MetricsProcessor.Config(log_freq=1000),
        checkpoint=CheckpointManager.Config(enable=False),
        activation_checkpoint={"none": None, "full": FullAC.Config(), "selective": SelectiveAC.Config()}[checkpointing],
    )


def inject_only(injector: Injector, steps: set[int]) -> None:
    """Leave out every error of the plan but those of `steps`."""
    begin = injector.begin
    injector.begin = lambda step: begin(step) if step in steps else None


def train(
    section: AttentionCheck, steps: int, checkpointing: str, only: set[int] | None = None, *, compiled: bool = False
) -> dict:
    """Loss of every step, until the loss is not finite, and what was seen. only: the steps that are hit."""
    with TemporaryDirectory() as folder:
        options = config(folder, steps, checkpointing, compiled)
        options.debug.seed = 0
        begin = time.process_time()
        trainer = CheckedTrainer(options, section)
        if only is not None:
            inject_only(trainer.checks.injector, only)
        try:
            trainer.train()
            ended = ""
        except RuntimeError as error:
            ended = str(error)
        finally:
            took = time.process_time() - begin
            trainer.close()
            if torch.distributed.is_initialized():
                torch.distributed.destroy_process_group()
    findings = trainer.checks.drain() if trainer.checks else []
    actions: dict[str, int] = {}
    for finding in findings:
        actions[finding["action"]] = actions.get(finding["action"], 0) + 1
    hits = trainer.checks.injector.hits if trainer.checks else []
    found = {finding["step"] for finding in findings}
    return {
        "losses": trainer.losses,
        "ended": ended,
        "hits": len(hits),
        "not_found": [hit for hit in hits if hit[0] not in found],
        "findings": actions,
        "found": [hit for hit in hits if hit[0] in found],
        "slots_again": trainer.again,
        "cpu_s": round(took, 1),
    }


def difference(run: dict, clean: dict) -> float:
    """Largest difference of the loss at any step; inf where the run has no finite loss any more."""
    pairs = list(zip(run["losses"], clean["losses"], strict=False))
    if len(run["losses"]) < len(clean["losses"]):
        return float("inf")
    return max(abs(a - b) if a == a else float("inf") for a, b in pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--every", type=int, default=2)
    parser.add_argument("--kinds", default="nan,inf,near-inf")
    parser.add_argument("--path", default="explicit")
    parser.add_argument("--section", default="*")
    parser.add_argument("--checkpointing", default="none", choices=("none", "full", "selective"))
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    for name, value in {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
    }.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("MASTER_PORT", "29731")

    def section(kind: str, frequency: float) -> AttentionCheck:
        inject = Inject(kind=kind, every=args.every, section=args.section) if kind else Inject()
        return AttentionCheck(enable=True, frequency=frequency, path=args.path, allow_injection=True, inject=inject)

    def run(kind: str, frequency: float, only: set[int] | None = None, compiled: bool = args.compile) -> dict:
        return train(section(kind, frequency), args.steps, args.checkpointing, only, compiled=compiled)

    results = {"clean": run("", 0.0), "clean, checked": run("", 1.0)}
    for kind in args.kinds.split(","):
        results[f"{kind}, checked"] = run(kind, 1.0)
        if args.compile:
            eager = results[f"{kind}, checked, eager"] = run(kind, 1.0, compiled=False)
            alike = [[hit for hit in run["found"] if hit[2] != SCORES] for run in (results[f"{kind}, checked"], eager)]
            print(f"{kind}: found compiled {len(alike[0])}, eager {len(alike[1])}; the same: {alike[0] == alike[1]}")
        results[f"{kind}, unchecked"] = run(kind, 0.0)
        not_found = results[f"{kind}, checked"]["not_found"]
        if not_found:
            only = {step for step, _, _ in not_found}
            results[f"{kind}, unchecked, only what was not found"] = run(kind, 0.0, only)
            for step, layer, name in not_found:
                print(f"{kind}: nothing was found of the error of step {step} in layer {layer}, {name}")
    print(f"path {args.path}, checkpointing {args.checkpointing}, an error every {args.every} steps")
    for name, run in results.items():
        print(
            f"{name:44s} hits {run['hits']:3d}  steps {len(run['losses']):3d}  loss difference "
            f"{difference(run, results['clean']):.3g}  findings {run['findings']}  "
            f"again {run['slots_again']}  {run['cpu_s']} s  {run['ended'][:60]}"
        )
    if args.json:
        args.json.write_text(json.dumps({"args": {k: str(v) for k, v in vars(args).items()}, **results}))


if __name__ == "__main__":
    main()
