"""torchft's lighthouse as a process of its own: who is alive, and which groups form the next quorum.

    python -m everstep.quorum.lighthouse --bind 0.0.0.0:29510 --min-groups 2

It keeps nothing on disk: after a restart on the same port the groups' managers report again and the next
quorum forms.
"""

import argparse
import os
import signal
from collections.abc import Sequence

from torchft.coordination import LighthouseServer

from everstep.run.lifeline import die_with_parent

QUORUM_TICK_MS = 50


def serve(bind: str, min_groups: int, join_timeout_s: float, heartbeat_timeout_s: float) -> None:
    """Run a lighthouse on `bind` ("host:port") until SIGTERM or SIGINT. Prints its address.

    `join_timeout_s`: how long a quorum waits for a group that heartbeats but has not asked to join.
    `heartbeat_timeout_s`: a group silent for this long is left out. Raises RuntimeError when the port is
    taken.
    """
    stops = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, stops)  # before the server's threads exist, which inherit it
    server = LighthouseServer(
        bind=bind,
        min_replicas=min_groups,
        join_timeout_ms=round(join_timeout_s * 1000),
        quorum_tick_ms=QUORUM_TICK_MS,
        heartbeat_timeout_ms=round(heartbeat_timeout_s * 1000),
    )
    print(
        f"lighthouse on {bind}, at least {min_groups} groups, pid {os.getpid()}: {server.address()}",
        flush=True,
    )
    signal.sigwait(stops)
    server.shutdown()


def main(args: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="everstep.quorum.lighthouse", description=__doc__)
    parser.add_argument("--bind", required=True, help="host:port to listen on")
    parser.add_argument("--min-groups", type=int, default=1)
    parser.add_argument("--join-timeout-s", type=float, default=2.0)
    parser.add_argument("--heartbeat-timeout-s", type=float, default=2.0)
    parser.add_argument("--die-with-parent", action="store_true", help="end when the process that started it ends")
    options = parser.parse_args(args)
    if options.die_with_parent:
        die_with_parent(os.getppid())
    try:
        serve(options.bind, options.min_groups, options.join_timeout_s, options.heartbeat_timeout_s)
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise SystemExit(f"lighthouse: cannot listen on {options.bind}: {reason}") from None


if __name__ == "__main__":
    main()
