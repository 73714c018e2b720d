"""A run whose workers' entry kills one rank, once, in the middle of a backward.

python mid_step_kill.py CONFIG GROUPS RANKS FOLDER      # as `everstep run`; EVERSTEP_TEST_KILL: "group/rank"
"""

import os
import signal
import sys

STEP = 2
GRADIENTS = 3
"""How many gradients of the slot are there when it dies."""


def main():
    """`torchtitan.train.main`; the first incarnation of rank EVERSTEP_TEST_KILL = "group/rank" dies in step STEP."""
    from torchtitan import train

    from everstep.titan.slot_computer import SlotComputer

    group = sys.argv[sys.argv.index("--fault_tolerance.group_id") + 1]
    if (
        os.environ["EVERSTEP_TEST_KILL"] == f"{group}/{os.environ['RANK']}"
        and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    ):
        compute = SlotComputer.compute

        def dies(slots, step, slot, *, check_all):
            if step < STEP:
                compute(slots, step, slot, check_all=check_all)
                return
            seen = []

            def on_gradient(param):
                seen.append(param)
                if len(seen) == GRADIENTS:
                    os.kill(os.getpid(), signal.SIGKILL)

            for part in slots._trainer.model_parts:
                for param in part.parameters():
                    if param.requires_grad:
                        param.register_post_accumulate_grad_hook(on_gradient)
            compute(slots, step, slot, check_all=check_all)
            os.kill(os.getpid(), signal.SIGKILL)  # a schedule that runs no hooks

        SlotComputer.compute = dies
    train.main()


if __name__ == "__main__":
    from everstep.launch import supervisor, worker
    from everstep.launch.prepare import PrepareOptions
    from everstep.run.directory import LaunchError
    from everstep.run.exits import USAGE_EXIT

    config, groups, ranks, folder, worker.ENTRY = sys.argv[1:]
    options = PrepareOptions(config, groups=int(groups), ranks=int(ranks), run_dir=folder)
    try:
        sys.exit(supervisor.run(options))
    except LaunchError as refusal:
        print(f"refused: {refusal}")
        sys.exit(USAGE_EXIT)
