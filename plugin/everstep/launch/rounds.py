"""What a group's machines agree on before each incarnation of its workers. With one machine there is nothing to agree
on; `meeting` is for several."""

import os
import socket
from dataclasses import dataclass

from everstep.launch.machine import listen

UNLIMITED_RESTARTS = 2**31 - 1


class NodeLost(RuntimeError):
    """The agent on another node of this group is gone: a batch system has to start the group again."""


class AskedToStop(Exception):
    """While the other nodes of the group were awaited."""


@dataclass(frozen=True)
class Round:
    """One incarnation of a group's workers, as one of its nodes sees it."""

    run_id: str
    host: str
    port: int
    """Where the workers' store is."""
    node_rank: int
    sizes: list[int]
    """How many ranks each node has."""
    listener: socket.socket | None
    """Of the store, on node 0, which has to start it."""

    @property
    def ranks(self) -> range:
        """Of this node."""
        first = sum(self.sizes[: self.node_rank])
        return range(first, first + self.sizes[self.node_rank])

    def environment(self, rank: int, role: str, restarts: int) -> dict[str, str]:
        """What torchrun documents that a worker finds in its environment."""
        size = str(sum(self.sizes))
        return {
            "LOCAL_RANK": str(rank - self.ranks.start),
            "RANK": str(rank),
            "GROUP_RANK": str(self.node_rank),
            "ROLE_RANK": str(rank),
            "ROLE_NAME": role,
            "LOCAL_WORLD_SIZE": str(len(self.ranks)),
            "WORLD_SIZE": size,
            "GROUP_WORLD_SIZE": str(len(self.sizes)),
            "ROLE_WORLD_SIZE": size,
            "MASTER_ADDR": self.host,
            "MASTER_PORT": str(self.port),
            "TORCHELASTIC_RESTART_COUNT": str(restarts),
            "TORCHELASTIC_MAX_RESTARTS": str(UNLIMITED_RESTARTS),
            "TORCHELASTIC_RUN_ID": self.run_id,
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
        }


class Alone:
    """The one machine of a group, where a round is had for the asking. `Meeting` has the same methods."""

    def __init__(self, run_id: str, host: str, ranks: int) -> None:
        self._run_id, self._host, self._ranks = run_id, host, ranks

    def next_round(self) -> Round:
        """Raises LaunchError if the host is not this machine, and OSError if there is no room for a socket."""
        listener = listen(self._host)
        return Round(self._run_id, self._host, listener.getsockname()[1], 0, [self._ranks], listener)

    def beat(self) -> None:
        """Nobody listens."""

    def is_awaited(self) -> bool:
        """Whether another machine has gone on to the next round."""
        return False

    def tell_killed(self) -> None:
        """Nobody listens."""

    def others_were_killed(self, within_s: float) -> bool:
        """Whether a worker on another machine was killed."""
        return False

    def all_ended(self) -> bool:
        """Whether the workers of all other machines have finished."""
        return True
