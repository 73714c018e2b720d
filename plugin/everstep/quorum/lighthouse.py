"""torchft's lighthouse behind its gate, as a process of its own: who is alive, and which groups form the next quorum.

    python -m everstep.quorum.lighthouse --bind 10.0.0.1:29510 --run-dir RUN_DIR --min-groups 2

Only replicas that know the token in RUN_DIR are let in (`everstep.quorum.gate`). It keeps nothing on disk: after a
restart on the same port the groups report again and the next quorum forms.
"""

import argparse
import os
import resource
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from torchft.coordination import LighthouseServer

from everstep.quorum.gate import Gate, GateError, loopback_port, shut
from everstep.quorum.membership import HEARTBEAT_S, HEARTBEATS
from everstep.run.events import EventLog
from everstep.run.lifeline import die_with_parent
from everstep.run.stops import collect_stops
from everstep.run.token import run_token
from everstep.wire import parse_address

QUORUM_TICK_MS = 50
LOOPBACK = "127.0.0.1"
LOOK_EVERY_S = 0.2


def run(
    bind: str,
    run_dir: Path,
    min_groups: int,
    join_timeout_s: float,
    heartbeat_timeout_s: float,
    encrypt: bool = False,
) -> None:
    """Run a lighthouse on `bind` ("host:port") until one of STOPS. Prints its address.

    `join_timeout_s`: how long a quorum waits for a group that heartbeats but has not asked to join.
    `heartbeat_timeout_s`: a group silent for this long is left out. `encrypt`: fault_tolerance.encrypt.

    Raises:
        GateError: the port is taken, or torchft's lighthouse ended.
        ValueError: there is no token that can be trusted in `run_dir`, or `bind` is no address.
        WireError: the same of `bind`.
    """
    token, place = run_token(run_dir), parse_address(bind)
    events = EventLog(run_dir, None, None, "lighthouse")
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))  # a descriptor for each group, and for strangers
    every_s = min(HEARTBEAT_S, heartbeat_timeout_s / HEARTBEATS)  # by so much later may a silent group be noticed
    # The server and each of the gate's clients have a runtime of their own. Set before there is any: their threads read
    # the environment, which must not move under them.
    os.environ["TOKIO_WORKER_THREADS"] = "1"
    inner = LighthouseServer(
        bind=f"{LOOPBACK}:0",
        min_replicas=min_groups,
        join_timeout_ms=round(join_timeout_s * 1000),
        quorum_tick_ms=QUORUM_TICK_MS,
        heartbeat_timeout_ms=round((heartbeat_timeout_s + every_s) * 1000),
    )
    port = loopback_port(inner.address())

    def tell(count: int, last: str) -> None:
        events.emit("stranger_refused", count=count, reason=last)

    stops = collect_stops()
    try:
        gate = Gate(token, place, f"http://{LOOPBACK}:{port}", every_s, heartbeat_timeout_s, tell, encrypt)
        if not shut(port):
            print(f"lighthouse: this kernel does not let port {port} of {LOOPBACK} be closed to others", flush=True)
        gate.open()
        print(f"lighthouse on {bind}, at least {min_groups} groups, pid {os.getpid()}", flush=True)
        while not stops:
            time.sleep(LOOK_EVERY_S)
            if gate.lost.is_set():
                raise GateError("torchft's lighthouse has gone from behind its gate")
        gate.close()
    finally:
        inner.shutdown()


def main(args: Sequence[str] | None = None) -> int:
    """The process. Returns its exit status."""
    parser = argparse.ArgumentParser(prog="everstep.quorum.lighthouse", description=__doc__)
    parser.add_argument("--bind", required=True, help="host:port to listen on")
    parser.add_argument("--run-dir", type=Path, required=True, help="whose token admits replicas")
    parser.add_argument("--min-groups", type=int, default=1)
    parser.add_argument("--join-timeout-s", type=float, default=2.0)
    parser.add_argument("--heartbeat-timeout-s", type=float, default=2.0)
    parser.add_argument("--encrypt", action="store_true", help="members must encrypt what they say")
    parser.add_argument("--die-with-parent", action="store_true", help="end when the process that started it ends")
    options = parser.parse_args(args)
    if options.die_with_parent:
        die_with_parent(os.getppid())
    try:
        waits = options.join_timeout_s, options.heartbeat_timeout_s
        run(options.bind, options.run_dir, options.min_groups, *waits, options.encrypt)
    except (GateError, ValueError, OSError) as error:
        print(f"lighthouse: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)  # Python aborts a process that ends while one of its threads is in torchft's client
