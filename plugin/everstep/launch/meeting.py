"""What the agents of a group agree on before each start of its workers: that all have come, and where the workers'
store is. A group on one node has nothing to agree on.

The agents of a group on several nodes share the run directory. Each has a note there, which it alone writes. A node
whose workers died joins the next round; the others see that in its note and follow.
"""

import json
import os
import socket
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from everstep.launch.machine import listen
from everstep.launch.settings import GroupSettings
from everstep.run.beats import age_s, agent_beat_path
from everstep.run.fence import Fenced
from everstep.run.files import hold_alone, open_own, read_typed

UNLIMITED_RESTARTS = 2**31 - 1
NOTE_BYTES = 1024
SILENCE_S = 30.0
"""An agent of the group that was there and has not beaten for this long is gone, its node with it perhaps."""
ARRIVAL_S = 900.0
"""How much later than this one another agent of the group may come. Each looks at its node first, which may take some
minutes."""


@dataclass(frozen=True)
class Round:
    """One start of a group's workers, as one of its nodes sees it."""

    run_id: str
    host: str
    port: int
    """Where the workers' store is."""
    node_rank: int
    sizes: list[int]
    """How many ranks each node has."""
    listener: socket.socket | None
    """Of the store, on node 0, whose first rank serves it."""

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


@dataclass(frozen=True)
class _Note:
    """What an agent says to the others of its group."""

    ranks: int
    """Of its node."""
    round: int = 0
    """The one that it has joined."""
    killed: int = 0
    """The last round in which a signal ended a worker of its node."""
    ended: bool = False
    """Whether its workers have done their work."""
    host: str = ""
    port: int = 0
    """Node 0: where the store of its round is."""


class Meeting:
    """Where the agents of one group meet, each of which runs the workers of one node. Nothing here waits.

    A note is written in place: a name that is given to another file may be an old one for a while over NFS.

    An agent that takes another's place on its node goes on with that one's note.

    Raises:
        Fenced: another agent of this node lives.
    """

    def __init__(self, settings: GroupSettings) -> None:
        self._settings = settings
        self._mine = _Note(settings.ranks)
        self._listener: socket.socket | None = None
        self._came_mono = time.monotonic()
        self._fd = -1
        if settings.nodes > 1:
            path = self._path(settings.node_rank)
            if not hold_alone(path.with_suffix(".alive")):
                raise Fenced(f"group {settings.group} has an agent on its node {settings.node_rank} already")
            self._fd = open_own(path)
            self._say(replace(read_typed(_Note, path) or self._mine, ranks=settings.ranks, ended=False))
        self._left = self._mine.round
        """The last round that began."""

    def next_round(self) -> Round | None:
        """The next round, once every node has joined it; None until then. Raises LaunchError if the host is not this
        machine, and OSError if there is no room for a socket."""
        settings = self._settings
        if self._mine.round == self._left:
            mine = replace(self._mine, round=self._left + 1, ended=False)
            if settings.node_rank == 0:
                self._listener = listen(settings.host)
                mine = replace(mine, host=settings.host, port=self._listener.getsockname()[1])
            self._say(mine)
        number, notes = self._mine.round, self._notes()
        if len(notes) < settings.nodes or any(note.round < number for note in notes.values()):
            return None
        self._left = number
        sizes = [notes[node].ranks for node in sorted(notes)]
        listener, self._listener = self._listener, None
        run_id = f"group-{settings.group}.{settings.claim}"
        return Round(run_id, notes[0].host, notes[0].port, settings.node_rank, sizes, listener)

    def lost(self, now_mono: float, awake_mono: float) -> str:
        """Why a node of the group must be taken for gone; "" if all are there, or may still come. Silence before
        `awake_mono` does not count."""
        notes = self._notes()
        for node in set(range(self._settings.nodes)) - {self._settings.node_rank}:
            if node not in notes:
                if now_mono - self._came_mono > ARRIVAL_S:
                    return f"the agent on node {node} of this group has not come within {ARRIVAL_S:g} s"
                continue
            silent_s = age_s(agent_beat_path(self._settings.run_dir, self._settings.group, node))
            if min(silent_s or 0.0, now_mono - awake_mono) > SILENCE_S and not notes[node].ended:
                return f"the agent on node {node} of this group has been silent for {SILENCE_S:g} s"
        return ""

    @property
    def is_awaited(self) -> bool:
        """Whether another node has gone on to the next round and waits there for this one."""
        return any(note.round > self._left for note in self._notes().values())

    def tell_killed(self) -> None:
        """A signal ended a worker of this node: what fails on the others now, fails for want of it."""
        self._say(replace(self._mine, killed=self._left))

    @property
    def others_were_killed(self) -> bool:
        """Whether another node has told that a signal ended a worker of this round."""
        mine = self._settings.node_rank
        return any(note.killed == self._left for node, note in self._notes().items() if node != mine)

    def tell_ended(self) -> None:
        """The workers of this node have done their work."""
        if not self._mine.ended:
            self._say(replace(self._mine, ended=True))

    @property
    def all_ended(self) -> bool:
        """Whether the workers of all nodes have done their work."""
        return all(note.ended for note in self._notes().values())

    def _path(self, node: int) -> Path:
        settings = self._settings
        name = f"group-{settings.group}.node-{node}.{settings.job}-{settings.restart}.json"
        return settings.run_dir / "state" / name

    def _say(self, note: _Note) -> None:
        if self._fd >= 0:
            os.pwrite(self._fd, json.dumps(asdict(note)).encode().ljust(NOTE_BYTES), 0)
            os.fdatasync(self._fd)
        self._mine = note

    def _notes(self) -> dict[int, _Note]:
        """By node, of those that have come."""
        notes = {self._settings.node_rank: self._mine}
        for node in range(self._settings.nodes):
            note = None if node in notes else read_typed(_Note, self._path(node))
            if note is not None:  # else it has not come, or is being written
                notes[node] = note
        return notes
