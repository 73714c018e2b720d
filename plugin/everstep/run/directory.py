"""The run directory: its files, and the lock by which at most one supervisor uses it at a time."""

import errno
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from everstep.run.fence import CLAIMED, groups_held
from everstep.run.files import file_system_now, lock_for_life, lock_holder, make_folder, read_json, read_typed

NO_ROOM = 1 << 16
"""Free bytes below which a disk counts as full."""


class LaunchError(Exception):
    """An error that the user can fix. Its text is all they need to see."""


def default_run_dir(config: Path) -> Path:
    """Return `runs/<config>-<timestamp>`, relative to the current folder."""
    return Path("runs") / f"{config.stem}-{time.strftime('%Y%m%d-%H%M%S')}"


def make_run_dir(path: Path) -> None:
    """Make a run directory that only its owner can write to, whatever the umask and the parent folder allow. An
    existing one stays as it is."""
    path.mkdir(mode=0o755, parents=True, exist_ok=True)


@dataclass(frozen=True)
class End:
    """How a group ended for good on a machine: `status` is a key of `everstep.launch.group.EXITS`."""

    status: str
    reason: str


def lock_run_dir(run_dir: Path) -> None:
    """Make a run directory if there is none, and lock it for this process. The lock ends with the process, however that
    ends; processes that it forks do not hold it. Raises LaunchError if another run or agents of groups use it, or it
    cannot be used."""
    lock = lock_file(run_dir)
    try:
        make_run_dir(run_dir)
        alone = lock_for_life(lock)
    except OSError as error:
        raise LaunchError(f"{run_dir}: cannot be used as run directory: {error.strerror}.") from None
    if not alone:
        raise in_use(run_dir)
    if groups := groups_held(run_dir, CLAIMED):  # ranks of a launcher that was killed may still be dying
        raise LaunchError(
            f"{run_dir}: in use by agents, which run {', '.join(groups)}. "
            f"Stop them with `everstep stop {run_dir}`, or give another --run-dir."
        )


def in_use(run_dir: Path) -> LaunchError:
    """Return the error of a start in a run directory that an `everstep run` holds."""
    pid = holder_of(run_dir) or "unknown"
    return LaunchError(
        f"{run_dir}: in use by a run that is still going (pid {pid}). Stop it, or give another --run-dir."
    )


def holder_of(run_dir: Path) -> int | None:
    """Return the pid that holds the run directory's lock (`lock_holder`); None if it is free."""
    return lock_holder(lock_file(run_dir))


def refuse_starting(run_dir: Path) -> None:
    """Raise LaunchError if a run holds the directory, in which the caller misses what a started run has."""
    if (pid := holder_of(run_dir)) is not None:
        raise LaunchError(
            f"{run_dir}: the run is still starting (pid {pid or 'unknown'}), or its state/ was removed. Try again in a "
            "moment, or else start the run again."
        )


def require_events(run_dir: Path) -> None:
    """Raise LaunchError if `run_dir` has no events: it is no run directory, or its run is still starting. The jobs of a
    submitted run may be pending still, or may never have started."""
    if not any((run_dir / "events").glob("*.jsonl")) and not job_file(run_dir).exists():
        refuse_starting(run_dir)
        raise LaunchError(f"{run_dir} is not a run directory: it has no events/*.jsonl.")


def check_room(run_dir: Path, *, writes: bool = True) -> None:
    """Raise the OSError of a write to the run directory if its disk is full or read-only now. `writes`: also try a
    write, because a file system that an error has made read-only does not say so."""
    disk, why = os.statvfs(run_dir), 0
    if disk.f_flag & os.ST_RDONLY:
        why = errno.EROFS
    elif disk.f_bavail * disk.f_frsize < NO_ROOM or (disk.f_files and not disk.f_favail):
        why = errno.ENOSPC
    if why:
        raise OSError(why, os.strerror(why), str(run_dir))
    if writes and os.stat(run_dir).st_uid == os.geteuid():  # another user only asks for the status
        file_system_now(run_dir)


def lock_file(run_dir: Path) -> Path:
    return Path(run_dir) / ".lock"


def config_file(run_dir: Path) -> Path:
    """Return the file of the run's config with everything resolved, which the workers load."""
    return Path(run_dir) / "config.toml"


def over_file(run_dir: Path, group: int) -> Path:
    """Return the file that says how a group ended for good (an `End`). As long as it is missing, a batch job starts the
    group again, unless its agent was fenced."""
    return Path(run_dir) / "state" / f"group-{group}.over"


def ends_of_groups(run_dir: Path) -> Iterator[End | None]:
    """Yield, for each group that the run should have, how it ended for good; None if it has not."""
    return (read_typed(End, over_file(run_dir, group)) for group in range(number_of_groups(run_dir) or 1))


def starts_file(run_dir: Path, group: int | None) -> Path:
    """Return the file that counts a batch job's starts: of a group since its last commit, or of the lighthouse (`group`
    is None) since it last served."""
    return Path(run_dir) / "state" / ("lighthouse.starts" if group is None else f"group-{group}.starts")


def bad_node_file(run_dir: Path, group: int) -> Path:
    """Return the file that names the node that a group's last agent found bad: {"node", "host", "reason", "claim"}."""
    return Path(run_dir) / "state" / f"group-{group}.bad-node.json"


def stop_file(run_dir: Path) -> Path:
    """Return the file that asks every agent of the run for a clean stop, as long as it exists."""
    return Path(run_dir) / "state" / "stop"


def job_file(run_dir: Path) -> Path:
    """Return the file that names the Slurm jobs of a submitted run."""
    return Path(run_dir) / "state" / "slurm.json"


def prepared_file(run_dir: Path) -> Path:
    """Return the file with what processes other than trainers need of the config (`launch.prepare.Prepared`)."""
    return Path(run_dir) / "state" / "prepared.json"


def refused_file(run_dir: Path) -> Path:
    """Return the file that says why the config of the last `everstep run` was refused: {"error"}."""
    return Path(run_dir) / "state" / "refused.json"


def loaded_file(run_dir: Path) -> Path:
    """Return the file that says which checkpoint the run went on from, and by which settings (`titan.load_once`)."""
    return Path(run_dir) / "state" / "loaded.json"


def exact_file(run_dir: Path) -> Path:
    """Return the file with the fingerprint of the first start of a run with `exact` (`titan.exactness`)."""
    return Path(run_dir) / "state" / "exact.json"


def groups_file(run_dir: Path) -> Path:
    """Return the file that holds a live run's changed number of groups: {"groups"}. The next start removes it."""
    return Path(run_dir) / "state" / "groups.json"


def number_of_groups(run_dir: Path) -> int:
    """Return how many groups the run should have now, G, with the ids 0 to G-1. 0 if the run directory does not say."""
    return _groups_in(groups_file(run_dir)) or _groups_in(prepared_file(run_dir))


def _groups_in(path: Path) -> int:
    said = read_json(path).get("groups")
    return said if isinstance(said, int) and said > 0 else 0


def is_surplus(run_dir: Path, group: int) -> bool:
    """Return whether the run should go on without this group, because `everstep scale` set a lower number of groups."""
    return 0 < _groups_in(groups_file(run_dir)) <= group


def ended_file(run_dir: Path) -> Path:
    """Return the file that says why no group of the run can go on: {"reason"}. The next start of the run removes it."""
    return Path(run_dir) / "state" / "ended.json"


def finished_file(run_dir: Path) -> Path:
    """Return the file that says that the run, or a start of it that was stopped, has ended at a step whose state is
    saved: {"step", "for_all"}."""
    return Path(run_dir) / "state" / "finished.json"


def finished_step(run_dir: Path) -> int:
    """Return the step in `finished_file`; -1 if there is none."""
    step = read_json(finished_file(run_dir)).get("step")
    return step if isinstance(step, int) else -1


def ask_to_stop(run_dir: Path) -> None:
    """Make `stop_file`."""
    make_folder(stop_file(run_dir).parent)
    stop_file(run_dir).touch()
