"""A torchtitan checkpoint out of a run's memory: `everstep snapshots --export`, and what writes `[checkpoint]` when
snapshots are on.

    python -m everstep.titan.export RUN_DIR FOLDER [--not-before STEP] [--below] [--group K]

A process of its own, at low priority and without a device. It takes the state first and looks for torchtitan then:
importing it takes longer than some steps, after which the keepers hold another.
"""

import argparse
import os
import shutil
import sys
import time
from datetime import timedelta
from pathlib import Path

from everstep.run.events import EventLog
from everstep.run.lifeline import die_with_parent
from everstep.snapshot.recovery import ExportError, Whole, fetch, whole
from everstep.titan.dataloader_blob import unpack_dataloader

TIMEOUT = timedelta(seconds=10)
PATIENCE = timedelta(seconds=60)


def export(run_dir: Path, folder: Path, *, not_before: int = 0, below: bool = False, writer: int = 0) -> Whole:
    """Write the newest state in memory as a checkpoint.

    Args:
        run_dir: of the run.
        folder: where to; with `below`, into its `step-N`.
        not_before: the lowest step that will do.
        writer: who writes; no two do at once. With `below`, names the folder that a checkpoint is in until it is whole.

    Raises:
        ExportError: there is none, or it is of another model than the run directory's config.
    """
    found = whole(fetch(run_dir, not_before=not_before, timeout=TIMEOUT, patience=PATIENCE))
    from everstep.titan import cpu

    cpu.stand_in()
    from torch.distributed.checkpoint.api import CheckpointException

    from everstep.titan.checkpoints import export_checkpoint, put_in_place
    from everstep.titan.load import load_config
    from everstep.titan.trainer import EverstepTrainer

    config = load_config(run_dir / "config.toml", EverstepTrainer.Config, check=False)
    target = folder / f"step-{found.step}" if below else folder
    draft = folder / f"writing-{writer}" if below else folder
    if below:
        shutil.rmtree(draft, ignore_errors=True)  # of one that was killed
    try:
        export_checkpoint(config, found.tensors, found.meta, unpack_dataloader(found.blobs), draft)
    except (ValueError, KeyError) as error:
        raise ExportError(f"{run_dir}: the state in memory does not fit {run_dir / 'config.toml'}: {error}") from error
    except CheckpointException as error:
        why, _ = next(iter(error.failures.values()))
        raise ExportError(f"{type(why).__name__}: {why}") from error
    if below:
        put_in_place(draft, target)
    return found


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="everstep.titan.export", description=__doc__.splitlines()[0])
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--not-before", type=int, default=0, help="the lowest step that will do")
    parser.add_argument("--below", action="store_true", help="write to FOLDER/step-N")
    parser.add_argument("--group", type=int, help="the group whose trainer asked, and with which this process ends")
    options = parser.parse_args(argv)
    if options.group is not None:
        die_with_parent(os.getppid())
    events = EventLog(options.run_dir, options.group, 0, "exporter") if options.group is not None else None
    os.nice(10)
    begin = time.monotonic()
    try:
        found = export(
            options.run_dir,
            options.folder,
            not_before=options.not_before,
            below=options.below,
            writer=options.group or 0,
        )
    except (ExportError, OSError) as error:
        print(f"export: {error}", file=sys.stderr, flush=True)
        if events is not None:
            folder = str(options.folder)
            events.emit("checkpoint_failed", options.not_before, reason=str(error), folder=folder)
        return 1
    if events is not None:
        events.emit("checkpoint_saved", found.step, took_s=round(time.monotonic() - begin, 3), source="memory")
    return 0


if __name__ == "__main__":
    sys.exit(main())
