"""Runs the supervisor on the tiny trainer: `python run_tiny.py RUN_DIR GROUPS RANKS [flags]`."""

import sys
from pathlib import Path

from everstep.config.sections import FaultTolerance
from everstep.launch import supervisor, view, warm
from everstep.run.directory import LaunchError

PRELOAD = ("torchft", "everstep.launch.group_agent", "everstep.quorum.lighthouse", "tiny_trainer")


def main():
    run_dir, groups, ranks, *flags = sys.argv[1:]
    warm.SILENCE_S = 3.0
    supervisor.AGENT_SILENCE_S = 6.0
    config = Path(run_dir).with_suffix(".toml")
    config.write_text("")
    settings = supervisor.RunSettings(
        config=config,
        run_dir=Path(run_dir),
        groups=int(groups),
        ranks_per_group=int(ranks),
        fault_tolerance=FaultTolerance(
            enable=True,
            stall_timeout_s=3.0,
            startup_timeout_s=60.0,
            on_poison="skip" if "--tiny.skip" in flags else "stop",
        ),
        flags=flags,
        entry="tiny_trainer:main",
        prepare="tiny_trainer:prepare",
        preload=PRELOAD,
    )
    try:
        with view.open_view(settings.groups) as on_events:
            sys.exit(supervisor.run(settings, on_events))
    except LaunchError as error:
        print(f"everstep: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
