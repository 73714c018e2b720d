"""How the agents of a group agree on each start of its workers (a round): all have joined, and the workers' store is at
a known address. A group on one node has nothing to agree on.

The agents of a group on several nodes share the run directory. Each agent has a note there that only it writes. A node
whose workers died joins the next round; the other nodes see that in its note and follow.
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
from everstep.run.files import lock_for_life, open_own, read_typed

UNLIMITED_RESTARTS = 2**31 - 1
NOTE_BYTES = 1024
SILENCE_S = 30.0
"""Seconds without a beat after which an agent that had joined counts as gone, perhaps with its node."""
ARRIVAL_S = 900.0
"""How much later than this agent another one of the group may join, in seconds."""


@dataclass(frozen=True)
class RendezvousRound:
    """One start of a group's workers, as seen from one of its nodes."""

    settings: GroupSettings
    host: str
    port: int
    """Port of the workers' store at `host`."""
    listener: socket.socket | None
    """On node 0: the socket of the store, which rank 0 serves beside its trainer. On others: None."""

    @property
    def ranks(self) -> range:
        """The ranks of this node."""
        first = self.settings.node_rank * self.settings.ranks
        return range(first, first + self.settings.ranks)

    def environment(self, rank: int, restarts: int) -> dict[str, str]:
        """Return the environment variables that torchrun documents for its workers."""
        settings = self.settings
        size, name = str(settings.nodes * settings.ranks), f"group-{settings.group}"
        return {
            "LOCAL_RANK": str(rank - self.ranks.start),
            "RANK": str(rank),
            "GROUP_RANK": str(settings.node_rank),
            "ROLE_RANK": str(rank),
            "ROLE_NAME": name,
            "LOCAL_WORLD_SIZE": str(settings.ranks),
            "WORLD_SIZE": size,
            "GROUP_WORLD_SIZE": str(settings.nodes),
            "ROLE_WORLD_SIZE": size,
            "MASTER_ADDR": self.host,
            "MASTER_PORT": str(self.port),
            "TORCHELASTIC_RESTART_COUNT": str(restarts),
            "TORCHELASTIC_MAX_RESTARTS": str(UNLIMITED_RESTARTS),
            "TORCHELASTIC_RUN_ID": f"{name}.{settings.claim}",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
        }


@dataclass(frozen=True)
class _Note:
    """What an agent tells the other agents of its group."""

    round: int = 0
    """The last round that it has joined."""
    killed: int = 0
    """The last round in which a signal killed a worker of its node."""
    ended: bool = False
    """Whether its workers have finished or stopped in this round; false again once it joins the next."""
    host: str = ""
    port: int = 0
    """Of node 0 alone: the address of the store of its round."""


class Rendezvous:
    """One agent's side of the agreement: its own note, and the notes of the other nodes. Nothing here blocks.

    A note is written in place, because over NFS the name of a replaced file may lead to the old one for a while. An
    agent that replaces another on its node goes on with that one's note.

    Raises:
        Fenced: another agent of this node lives.
    """

    def __init__(self, settings: GroupSettings) -> None:
        self._settings = settings
        self._mine = _Note()
        self._others: dict[int, _Note] = {}
        """The last notes that were read, by node."""
        self._listener: socket.socket | None = None
        self._came_mono = time.monotonic()
        self._fd = -1
        if settings.nodes > 1:
            path = self._path(settings.node_rank)
            if not lock_for_life(path.with_suffix(".alive")):
                raise Fenced(f"group {settings.group} has an agent on its node {settings.node_rank} already")
            self._fd = open_own(path)
            self._say(replace(read_typed(_Note, path) or self._mine, ended=False))
        self._left = self._mine.round
        """The last round that has begun on this node."""

    def next_round(self) -> RendezvousRound | None:
        """Join the next round, and return it once every node has joined; None before. Raises LaunchError if
        `settings.host` is no address of this machine, and OSError for a shortage."""
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
        listener, self._listener = self._listener, None
        return RendezvousRound(settings, notes[0].host, notes[0].port, listener)

    def lost(self, now_mono: float, awake_mono: float) -> str:
        """Return why another node of the group counts as gone; "" if all have joined or may still join. Silence before
        `awake_mono` does not count."""
        notes = self._notes()
        for node in set(range(self._settings.nodes)) - {self._settings.node_rank}:
            if node not in notes:
                if now_mono - self._came_mono > ARRIVAL_S:
                    return f"the agent on node {node} of this group has not joined within {ARRIVAL_S:g} s"
                continue
            silent_s = age_s(agent_beat_path(self._settings.run_dir, self._settings.group, node))
            if min(silent_s or 0.0, now_mono - awake_mono) > SILENCE_S and not notes[node].ended:
                return f"the agent on node {node} of this group has been silent for {SILENCE_S:g} s"
        return ""

    @property
    def is_awaited(self) -> bool:
        """Whether another node has joined the next round and waits there for this node."""
        return any(note.round > self._left for note in self._notes().values())

    def tell_killed(self) -> None:
        """Tell the other nodes that a signal killed a worker here, which explains errors of their workers."""
        self._say(replace(self._mine, killed=self._left))

    @property
    def others_were_killed(self) -> bool:
        """Whether another node has told that a signal killed one of its workers in this round."""
        mine = self._settings.node_rank
        return any(note.killed == self._left for node, note in self._notes().items() if node != mine)

    def tell_ended(self) -> None:
        """Tell the other nodes that the workers of this node have finished or stopped."""
        if not self._mine.ended:
            self._say(replace(self._mine, ended=True))

    @property
    def all_ended(self) -> bool:
        """Whether the workers of all nodes that have joined have finished or stopped."""
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
        """Return the notes of the nodes that have joined, by node."""
        mine = self._settings.node_rank
        for node in range(self._settings.nodes):
            note = None if node == mine else read_typed(_Note, self._path(node))
            if note is not None:  # else there is none yet, or it is being written
                self._others[node] = note
        return {mine: self._mine} | self._others
