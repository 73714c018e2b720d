"""Runs the lighthouse (torchft's, behind `everstep.quorum.gate`), which forms quorums of the groups that are alive.

It admits only groups that know the token in RUN_DIR. It keeps nothing on disk: after a restart on the same port, the
groups connect again and the next quorum forms. For example:

    python -m everstep.quorum.lighthouse --bind 10.0.0.1:29510 --run-dir RUN_DIR --min-groups 2
"""

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from everstep.quorum.gate import Gate, QuorumRules
from everstep.run.beats import BeatFile, lighthouse_beat_path
from everstep.run.directory import number_of_groups
from everstep.run.events import EventLog
from everstep.run.stops import collect_stops, die_with_parent
from everstep.run.token import run_token
from everstep.wire import parse_address

LOOK_EVERY_S = 0.2


def serve(options: argparse.Namespace) -> None:
    """Run a lighthouse with `main`'s options until a signal asks it to stop. Prints its address, and gives signs of
    life in the run directory while torchft's lighthouse answers.

    Raises:
        ConnectionError: see `Gate`; or torchft's lighthouse ended, or `bind` is not an address.
        ValueError: the run directory has no token that can be trusted.
    """
    token, place = run_token(options.run_dir), parse_address(options.bind)
    events = EventLog(options.run_dir, None, None, "lighthouse")
    stops = collect_stops()
    # Hundreds of threads may be ready at once, each for a short time. Switching between them every 5 ms, as by default,
    # would take more time than their work.
    sys.setswitchinterval(0.1)
    groups = number_of_groups(options.run_dir)
    rules = QuorumRules(options.min_groups, options.join_timeout_s, options.heartbeat_timeout_s, groups)
    gate = Gate(token, place, rules, lambda count, last: events.emit("stranger_refused", count=count, reason=last))
    print(f"lighthouse on {options.bind}, at least {options.min_groups} groups, pid {os.getpid()}", flush=True)
    heart = BeatFile(lighthouse_beat_path(options.run_dir))
    while not stops:
        if gate.lost.is_set():
            raise ConnectionError("torchft's lighthouse, in this process, does not answer any more: start it again")
        heart.beat("serves")
        time.sleep(LOOK_EVERY_S)
    gate.close()


def main(args: Sequence[str] | None = None) -> int:
    """Run the lighthouse's process; return its exit status."""
    parser = argparse.ArgumentParser(prog="everstep.quorum.lighthouse", description=__doc__)
    parser.add_argument("--bind", required=True, help="host:port to listen on")
    parser.add_argument("--run-dir", type=Path, required=True, help="run directory, whose token groups must know")
    parser.add_argument("--min-groups", type=int, default=1, help="fewest groups of a quorum")
    parser.add_argument("--join-timeout-s", type=float, default=2.0, help="longest wait for a group that does not ask")
    parser.add_argument("--heartbeat-timeout-s", type=float, default=2.0, help="a group silent for so long is left out")
    parser.add_argument("--die-with-parent", action="store_true", help="end when the process that started it ends")
    options = parser.parse_args(args)
    if options.die_with_parent:
        die_with_parent(os.getppid())
    try:
        serve(options)
    except (ValueError, OSError) as error:
        print(f"lighthouse: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)  # a normal exit aborts if a thread is still in torchft's client
