"""Runs the lighthouse (torchft's, behind `everstep.quorum.gate`), which forms quorums of the groups that are alive.

It admits only groups that know the token in RUN_DIR. It keeps nothing on disk: after a restart on the same port, the
groups connect again and the next quorum forms. For example:

    python -m everstep.quorum.lighthouse --bind 10.0.0.1:29510 --run-dir RUN_DIR --min-groups 2
"""

import os
import sys
import time
from pathlib import Path

import tyro

from everstep.quorum.gate import Gate, QuorumRules
from everstep.run.beats import BeatFile, lighthouse_beat_path
from everstep.run.directory import number_of_groups
from everstep.run.events import EventLog
from everstep.run.stops import collect_stops
from everstep.run.token import own_token
from everstep.wire import parse_address

LOOK_EVERY_S = 0.2


def serve(
    bind: str, run_dir: Path, min_groups: int = 1, join_timeout_s: float = 2.0, heartbeat_timeout_s: float = 2.0
) -> int:
    """Run a lighthouse until a signal asks it to stop. Print its address, and give signs of life in the run directory
    while torchft's lighthouse answers. Return the exit status.

    Args:
        bind: host:port to listen on.
        run_dir: The run directory, whose token groups must know.
        min_groups: Fewest groups of a quorum.
        join_timeout_s: Longest wait for a group that does not ask.
        heartbeat_timeout_s: A group that is silent for so long is left out.
    """
    try:
        _run(bind, run_dir, QuorumRules(min_groups, join_timeout_s, heartbeat_timeout_s, number_of_groups(run_dir)))
    except (ValueError, OSError) as error:  # the address, the token, or torchft's lighthouse
        print(f"lighthouse: {error}", file=sys.stderr)
        return 1
    return 0


def _run(bind: str, run_dir: Path, rules: QuorumRules) -> None:
    token, place = own_token(run_dir), parse_address(bind)
    events = EventLog(run_dir, None, None, "lighthouse")
    stops = collect_stops()
    # Hundreds of threads may be ready at once, each for a short time. Switching between them every 5 ms, as by default,
    # would take more time than their work.
    sys.setswitchinterval(0.1)
    gate = Gate(token, place, rules, lambda count, last: events.emit("stranger_refused", count=count, reason=last))
    print(f"lighthouse on {bind}, at least {rules.min_groups} groups, pid {os.getpid()}", flush=True)
    heart = BeatFile(lighthouse_beat_path(run_dir))
    while not stops:
        if gate.lost.is_set():
            raise ConnectionError("torchft's lighthouse, in this process, does not answer any more: start it again")
        heart.beat("serves")
        time.sleep(LOOK_EVERY_S)
    gate.close()


def main() -> int:
    """Run a lighthouse as the command line says, and return the exit status."""
    return tyro.cli(serve)


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)  # a normal exit aborts if a thread is still in torchft's client
