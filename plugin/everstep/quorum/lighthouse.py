"""torchft's lighthouse behind its gate, as a process of its own: who is alive, and which groups form the next quorum.

    python -m everstep.quorum.lighthouse --bind 10.0.0.1:29510 --run-dir RUN_DIR --min-groups 2

Only replicas that know the token in RUN_DIR are let in (`everstep.quorum.gate`). It keeps nothing on disk: after a
restart on the same port the groups report again and the next quorum forms.
"""

import argparse
import asyncio
import os
import resource
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from torchft.coordination import LighthouseServer

from everstep.quorum.gate import Gate, GateError, check_free, loopback_port, serve, shut
from everstep.run.events import EventLog
from everstep.run.lifeline import die_with_parent
from everstep.run.token import run_token

QUORUM_TICK_MS = 50
LOOPBACK = "127.0.0.1"
PASSED_ON_EVERY_S = 0.25
"""How often a group's heartbeats reach torchft's lighthouse: by so much later may a silent group be noticed."""


def run(bind: str, run_dir: Path, min_groups: int, join_timeout_s: float, heartbeat_timeout_s: float) -> None:
    """Run a lighthouse on `bind` ("host:port") until SIGTERM or SIGINT. Prints its address.

    `join_timeout_s`: how long a quorum waits for a group that heartbeats but has not asked to join.
    `heartbeat_timeout_s`: a group silent for this long is left out.

    Raises:
        GateError: the port is taken, or torchft's lighthouse ended.
        ValueError: there is no token that can be trusted in `run_dir`.
    """
    token = run_token(run_dir)
    check_free(bind)
    events = EventLog(run_dir, None, None, "lighthouse")
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))  # a descriptor for each group, and for strangers
    every_s = min(PASSED_ON_EVERY_S, heartbeat_timeout_s / 8)
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

    def listening() -> None:
        print(f"lighthouse on {bind}, at least {min_groups} groups, pid {os.getpid()}", flush=True)

    async def stand() -> None:
        gate = Gate(token, f"{LOOPBACK}:{port}", every_s, heartbeat_timeout_s, tell)
        await gate.connect()
        if not shut(port):
            print(f"lighthouse: this kernel does not let port {port} of {LOOPBACK} be closed to others", flush=True)
        serving = asyncio.ensure_future(serve(gate, bind, listening))
        for signum in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(signum, serving.cancel)
        try:
            await serving
        except asyncio.CancelledError:
            pass  # asked to stop
        finally:
            await gate.close()

    try:
        asyncio.run(stand())
    finally:
        inner.shutdown()


def main(args: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="everstep.quorum.lighthouse", description=__doc__)
    parser.add_argument("--bind", required=True, help="host:port to listen on")
    parser.add_argument("--run-dir", type=Path, required=True, help="whose token admits replicas")
    parser.add_argument("--min-groups", type=int, default=1)
    parser.add_argument("--join-timeout-s", type=float, default=2.0)
    parser.add_argument("--heartbeat-timeout-s", type=float, default=2.0)
    parser.add_argument("--die-with-parent", action="store_true", help="end when the process that started it ends")
    options = parser.parse_args(args)
    if options.die_with_parent:
        die_with_parent(os.getppid())
    try:
        run(options.bind, options.run_dir, options.min_groups, options.join_timeout_s, options.heartbeat_timeout_s)
    except (GateError, ValueError, OSError) as error:
        sys.exit(f"lighthouse: {error}")


if __name__ == "__main__":
    main()
