"""A run directory: everything of one run, and at most one supervisor at a time."""

import contextlib
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from everstep.run.files import hold_alone, holder, read_json, read_typed


class LaunchError(Exception):
    """Something the user can put right; its text is all they need to see."""


def default_run_dir(config: Path, now: time.struct_time) -> Path:
    """`runs/<config>-<timestamp>` below the current folder."""
    return Path("runs") / f"{config.stem}-{time.strftime('%Y%m%d-%H%M%S', now)}"


@contextlib.contextmanager
def leaves_nothing(path: Path, refusal: type[Exception] = LaunchError) -> Iterator[None]:
    """A folder that was not there before goes again, with the ones above it that were made for it, when what is done
    in it ends with `refusal`."""
    made = [folder for folder in (path, *path.parents) if not folder.exists()]
    try:
        yield
    except refusal:
        if made:
            shutil.rmtree(path, ignore_errors=True)
            for folder in made[1:]:
                with contextlib.suppress(OSError):
                    folder.rmdir()
        raise


def make_run_dir(path: Path) -> None:
    """Make a run directory that nobody else can write to, whatever the umask and the folder above it say. One that is
    there stays as it is."""
    path.mkdir(mode=0o755, parents=True, exist_ok=True)


@dataclass(frozen=True)
class End:
    """How a group ended on a machine, for good: its status is one of `everstep.launch.group.EXITS`."""

    status: str
    reason: str


def take(run_dir: Path) -> None:
    """Make a run directory if it is not there, and have it for this process alone until that ends, however it does.
    What it forks does not have it. Raises LaunchError while another live run has it."""
    lock = lock_file(run_dir)
    try:
        make_run_dir(run_dir)
        alone = hold_alone(lock)
        if alone:
            os.utime(lock)
    except OSError as error:
        raise LaunchError(f"{run_dir}: cannot be used as run directory: {error.strerror}.") from None
    if not alone:
        raise LaunchError(
            f"{run_dir}: in use by a run that is still going (pid {holder(lock) or 'unknown'}). "
            "Stop it, or give another --run-dir."
        )


def holder_of(run_dir: Path) -> tuple[int, float] | None:
    """Who has the run directory: its pid, and the wall time at which it took it. None: nobody on this machine."""
    try:
        pid = holder(lock_file(run_dir))
        return (pid, lock_file(run_dir).lstat().st_mtime) if pid else None
    except OSError:
        return None


def require_events(run_dir: Path) -> None:
    """For commands that look at a run. Raises LaunchError where there is none."""
    if not (run_dir / "events").is_dir():
        raise LaunchError(f"{run_dir} is no run directory: there are no events in it.")


def lock_file(run_dir: Path) -> Path:
    return Path(run_dir) / ".lock"


def config_file(run_dir: Path) -> Path:
    """The run's config with everything resolved; the workers load this one."""
    return Path(run_dir) / "config.toml"


def over_file(run_dir: Path, group: int) -> Path:
    """Says how a group ended for good: an `End`. A batch job starts a group again as long as there is none,
    whatever the exit status of its processes."""
    return Path(run_dir) / "state" / f"group-{group}.over"


def ends_of_groups(run_dir: Path) -> list[End | None]:
    """By group, of those that the run is to have, how it ended for good; None: it has not."""
    return [read_typed(End, over_file(run_dir, group)) for group in range(number_of_groups(run_dir) or 1)]


def starts_file(run_dir: Path, group: int | None) -> Path:
    """Says how often a batch job has started a group since its last commit, or the lighthouse (None) since it served
    last."""
    return Path(run_dir) / "state" / ("lighthouse.starts" if group is None else f"group-{group}.starts")


def bad_node_file(run_dir: Path, group: int) -> Path:
    """Names the node that a group's last agent found bad: {"node", "reason", "claim"}."""
    return Path(run_dir) / "state" / f"group-{group}.bad-node.json"


def stop_file(run_dir: Path) -> Path:
    """Asks every agent of the run for a clean stop, as long as it is there."""
    return Path(run_dir) / "state" / "stop"


def prepared_file(run_dir: Path) -> Path:
    """What the run's config says to all that is not a trainer, see `everstep.launch.prepare`."""
    return Path(run_dir) / "state" / "prepared.json"


def groups_file(run_dir: Path) -> Path:
    """Says how many groups a live run is to have, if that was changed: {"groups"}. The next start removes it."""
    return Path(run_dir) / "state" / "groups.json"


def number_of_groups(run_dir: Path) -> int:
    """How many groups the run is to have now: 0 to this, less 1, are their ids. 0: nobody has said."""
    return _groups_in(groups_file(run_dir)) or _groups_in(prepared_file(run_dir))


def _groups_in(path: Path) -> int:
    said = read_json(path).get("groups")
    return said if isinstance(said, int) and said > 0 else 0


def is_spare(run_dir: Path, group: int) -> bool:
    """Whether the run is to go on without this group, as `everstep scale` said."""
    return 0 < _groups_in(groups_file(run_dir)) <= group


def ended_file(run_dir: Path) -> Path:
    """Says why no group of the run can go on: {"reason"}. The next start of the run removes it."""
    return Path(run_dir) / "state" / "ended.json"


def ask_to_stop(run_dir: Path) -> None:
    """Make `stop_file`."""
    stop_file(run_dir).parent.mkdir(parents=True, exist_ok=True)
    stop_file(run_dir).touch()
