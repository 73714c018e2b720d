"""Stopped processes go on, whatever becomes of the injector: another process sees to it.

Each fault that stops something has a guard, a process in a session of its own. It is told of the fault before it
happens, and says that it has understood. It sends SIGCONT when the fault's time is up, or at once when the pipe from
the injector closes, which the kernel does for one that was killed. If the guard is killed as well, the worker stays
stopped until the watchdog of its run ends its group, after stall_timeout_s.
"""

import os
import select
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

from everstep.chaos.signals import Receivers
from everstep.run import typed
from everstep.run.directory import LaunchError
from everstep.run.events import EventLog
from everstep.run.stops import STOPS

ACK_TIMEOUT_S = 60.0


class GuardError(RuntimeError):
    """There is nobody who would end a fault, so there must be none."""


@dataclass(frozen=True)
class Held:
    """A fault that has to end."""

    fault: str
    target_group: int | list[int] | None
    lasts_s: Annotated[float, typed.Within(0, 1e9)]
    stopped: list[Receivers]


class Guards:
    """The injector's end."""

    def __init__(self, run_dir: Path):
        self._run_dir = Path(run_dir)
        self._processes: list[subprocess.Popen[bytes]] = []

    def hold(self, held: Held) -> None:
        """Entrust a fault that is about to happen. Raises GuardError when nobody takes it on."""
        log = self._run_dir / "logs" / "chaos.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        search = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
        with log.open("ab") as errors:
            process = subprocess.Popen(
                [sys.executable, "-m", "everstep.chaos.guard", str(self._run_dir), typed.dumps(asdict(held)).decode()],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(search)},
            )
        self._processes.append(process)
        assert process.stdout is not None
        ready, _, _ = select.select([process.stdout], [], [], ACK_TIMEOUT_S)
        if not ready or process.stdout.read(1) != b"+":
            raise GuardError(f"the guard of a fault in {self._run_dir} does not answer; see logs/chaos.log there")

    @property
    def holding(self) -> bool:
        """Whether some fault has not ended."""
        return any(process.poll() is None for process in self._processes)

    def close(self) -> None:
        """End every fault now; returns when that is done."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()
            process.wait()


def end(held: Held, events: EventLog) -> None:
    """Let what a fault stopped go on, and say so; a failure is said as well."""
    fields = {"fault": held.fault, "target_group": held.target_group}
    try:
        for receivers in held.stopped:
            receivers.signal(signal.SIGCONT)
    except (LaunchError, OSError) as error:
        events.emit("fault_undo_failed", **fields, reason=f"{type(error).__name__}: {error}")
    else:
        events.emit("fault_undone", **fields)


def main() -> None:
    """The guard process."""
    # What is meant for the injector, a Ctrl-C or the end of its terminal, must not keep us from ending the fault.
    for number in (*STOPS, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    held = typed.parse(Held, typed.loads(sys.argv[2]))
    events = EventLog(Path(sys.argv[1]), None, None, "chaos")
    until = time.monotonic() + held.lasts_s
    os.write(1, b"+")
    select.select([0], [], [], max(0.0, until - time.monotonic()))
    end(held, events)


if __name__ == "__main__":
    main()
