"""Faults end, whatever becomes of the injector: another process undoes them.

The guard is a session of its own. It is told of a fault before it happens, and says that it has understood; it undoes
the fault when its time is up, or at once when the pipe from the injector closes, which the kernel does for one that
was killed. What it has to undo is also in a journal, RUN_DIR/state/chaos/guard-PID.jsonl: should the guard be killed
as well, the next guard of this run undoes what was left.
"""

import contextlib
import errno
import fcntl
import os
import select
import signal
import stat
import subprocess
import sys
import time
import traceback
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated

from everstep.chaos.undo import Undo
from everstep.run import typed
from everstep.run.events import EventLog
from everstep.run.stops import STOPS
from everstep.run.token import require_own
from everstep.run.typed import UnfitError

ACK_TIMEOUT_S = 60.0
JOURNAL_LIMIT = 16 << 20


class GuardError(RuntimeError):
    """There is nobody who would end a fault, so there must be none."""


@dataclass(frozen=True)
class Held:
    """A fault that has to end."""

    fault: str
    target_group: int | list[int] | None
    lasts_s: Annotated[float, typed.Within(0, 1e9)]
    undo: Undo


class Guard:
    """The injector's end. The process starts with the first fault that has to be undone."""

    def __init__(self, run_dir: Path):
        self._run_dir = Path(run_dir)
        self._process: subprocess.Popen[bytes] | None = None
        self._until = 0.0

    def hold(self, held: Held) -> None:
        """Entrust a fault that is about to happen. Raises GuardError when nobody takes it on."""
        process = self._running()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(typed.dumps(asdict(held)) + b"\n")
            process.stdin.flush()
        except BrokenPipeError:
            raise GuardError(f"the guard of {self._run_dir} ended; see logs/chaos.log there") from None
        ready, _, _ = select.select([process.stdout], [], [], ACK_TIMEOUT_S)
        if not ready or process.stdout.read(1) != b"+":
            raise GuardError(f"the guard of {self._run_dir} does not answer; see logs/chaos.log there")
        self._until = max(self._until, time.monotonic() + held.lasts_s)

    @property
    def holding(self) -> bool:
        """Whether some fault has not had its time."""
        return time.monotonic() < self._until

    def close(self) -> None:
        """End every fault now; returns when that is done."""
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
            self._process.wait()
            self._process = None

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            log = self._run_dir / "logs" / "chaos.log"
            log.parent.mkdir(parents=True, exist_ok=True)
            search = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
            with log.open("ab") as errors:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "everstep.chaos.guard", str(self._run_dir)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    start_new_session=True,
                    env={**os.environ, "PYTHONPATH": os.pathsep.join(search)},
                )
        return self._process


@dataclass(frozen=True)
class _Line:
    """Of a journal: a fault was taken on, or without `held` has ended."""

    number: typed.Count
    held: Held | None


class Journal:
    """What a guard has taken on and not yet undone, on disk. Locked as long as its guard lives."""

    def __init__(self, path: Path):
        self.path = path
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        self._fd = os.open(path, flags, 0o600)
        found = os.fstat(self._fd)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
            os.close(self._fd)
            raise OSError(errno.EPERM, "is no journal that only this user can have written", str(path))

    def take(self) -> bool:
        """Lock it; False while its own guard lives."""
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def write(self, number: int, held: Held | None) -> None:
        """Number `number` is taken on, or with None it has ended."""
        kept = replace(held, undo=held.undo.for_a_journal) if held else None
        os.write(self._fd, typed.dumps(asdict(_Line(number, kept))) + b"\n")

    def left(self) -> list[Held]:
        """What has not ended. Lines that are none, torn by a kill for instance, are passed over."""
        found: dict[int, Held] = {}
        for line in os.pread(self._fd, JOURNAL_LIMIT, 0).splitlines():
            with contextlib.suppress(UnfitError):
                entry = typed.parse(_Line, typed.loads(line))
                found.pop(entry.number, None)
                if entry.held is not None:
                    found[entry.number] = entry.held
        return list(found.values())

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)
        os.close(self._fd)


def end(held: Held, events: EventLog) -> None:
    """Undo a fault, and say so. A failure is said as well, as an event and in the guard's log."""
    fields = {"fault": held.fault, "target_group": held.target_group}
    try:
        held.undo()
    except Exception as error:  # noqa: BLE001  the others have to be undone all the same
        traceback.print_exc()
        events.emit("fault_undo_failed", **fields, reason=f"{type(error).__name__}: {error}")
    else:
        events.emit("fault_undone", **fields)


def end_leftovers(run_dir: Path, events: EventLog) -> None:
    """Undo what guards of this run left that were killed."""
    require_own(run_dir)
    for path in sorted((run_dir / "state" / "chaos").glob("guard-*.jsonl")):
        try:
            journal = Journal(path)
        except OSError as error:
            print(f"{path} is passed over: {error.strerror}", flush=True)
            continue
        if journal.take():
            for held in journal.left():
                end(held, events)
            journal.remove()


def watch(run_dir: Path, answers: int) -> None:
    """The guard process: until stdin closes and everything has been undone. What it has understood, it says on the file
    descriptor `answers`."""
    events = EventLog(run_dir, None, None, "chaos")
    end_leftovers(run_dir, events)
    journal = Journal(run_dir / "state" / "chaos" / f"guard-{os.getpid()}.jsonl")
    journal.take()
    holding: dict[int, tuple[float, Held]] = {}
    count, unread, closed = 0, b"", False
    while not closed or holding:
        now = time.monotonic()
        for number, (until, held) in list(holding.items()):
            if closed or now >= until:
                end(held, events)
                journal.write(number, None)
                del holding[number]
        if closed:
            continue
        wait_s = max(0.0, min((until for until, _ in holding.values()), default=now + 3600.0) - now)
        if not select.select([0], [], [], wait_s)[0]:
            continue
        data = os.read(0, 1 << 20)
        closed = not data
        *lines, unread = (unread + data).split(b"\n")
        for line in lines:
            held = typed.parse(Held, typed.loads(line))
            journal.write(count, held)
            holding[count] = (time.monotonic() + held.lasts_s, held)
            count += 1
            os.write(answers, b"+")
    journal.remove()


def main() -> None:
    # What is meant for the injector, a Ctrl-C or the end of its terminal, must not keep us from undoing.
    for number in (*STOPS, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    answers = os.dup(1)
    os.dup2(2, 1)  # what an undo prints is no answer
    watch(Path(sys.argv[1]), answers)


if __name__ == "__main__":
    main()
