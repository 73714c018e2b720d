"""How a run ends: one group writes the last checkpoint, the others stand by until it is there.

The groups keep meeting in quorums. Whoever comes first among those that meet writes; should it die in the
middle, the next quorum lacks it and another one writes. A small marker in the run directory says that the state of a
step is saved, so a group that comes too late does not start the run over.
"""

import json
import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from time import monotonic

from everstep.quorum.membership import Membership, QuorumUnavailable

MARKER = Path("state") / "finished.json"


def finished_step(run_dir: Path) -> int:
    """The step at which this run last ended with its state saved; -1 if it never did."""
    try:
        return int(json.loads((run_dir / MARKER).read_text())["step"])
    except FileNotFoundError:
        return -1


def is_over(run_dir: Path, steps: int) -> bool:
    """Whether the run has done its `steps` already."""
    return finished_step(run_dir) >= steps


def finish(
    run_dir: Path,
    *,
    step: int,
    membership: Membership,
    save: Callable[[], None],
    beat: Callable[[str, int], None],
    all_in_group: Callable[[bool], bool],
    timeout: timedelta,
    give_up: timedelta,
) -> None:
    """Return once the state after `step` is saved, by this group or another. All ranks of the group call this.

    Args:
        save: writes the checkpoint; a collective of the group.
        beat: called with a phase's name wherever progress is made.
        all_in_group: whether a flag is true on all ranks of the group; a collective of the group.
        timeout: for one quorum.
        give_up: for the whole wait.

    Raises:
        TimeoutError: the other groups neither finished nor left.
    """
    begin = monotonic()
    while all_in_group(monotonic() - begin < give_up.total_seconds()):
        beat("finish", step)
        try:
            quorum = membership.join(step=step, failures=0, metadata="", timeout=timeout)
        except QuorumUnavailable:
            quorum = None
        # One rank may see the marker that another group writes just now, and another rank not yet.
        if all_in_group(finished_step(run_dir) >= step):
            return
        if all_in_group(quorum is not None and quorum.leads):
            beat("checkpoint", step)
            save()
            _mark(run_dir, step)
    raise TimeoutError(f"the other groups neither finished step {step} nor left within {give_up}")


def _mark(run_dir: Path, step: int) -> None:
    path = run_dir / MARKER
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(f".{os.getpid()}")
    draft.write_text(json.dumps({"step": step}))
    draft.replace(path)
