"""The processes of one start of a group's workers."""

import os
import signal
import time
from dataclasses import dataclass, field

from everstep.launch import offspring
from everstep.launch.children import Child
from everstep.launch.memory import oom_kills
from everstep.launch.rounds import Round


@dataclass
class Incarnation:
    """The processes of one start of a group's workers."""

    number: int
    place: Round
    workers: dict[int, Child] = field(default_factory=dict)
    store: Child | None = None
    ended: list[Child] = field(default_factory=list)
    """In the order of their deaths, as far as they were seen one after the other."""
    refused: int | None = None
    """The errno with which a process of it was refused."""
    started_mono: float = field(default_factory=time.monotonic)
    oom_kills: int = field(default_factory=oom_kills)
    committed: bool = False

    @property
    def mark(self) -> str:
        return f"{offspring.MARK}={os.getpid()}.{self.place.run_id}.{self.number}"

    @property
    def all(self) -> list[Child]:
        return [*self.workers.values(), *([self.store] if self.store else [])]

    @property
    def asked(self) -> bool:
        """Whether some have been asked for and have not come yet."""
        return self.refused is None and any(not child.pid for child in self.all)

    @property
    def running(self) -> list[Child]:
        """The workers that have not ended."""
        return [child for child in self.workers.values() if child.alive]

    @property
    def pids(self) -> dict[int, int]:
        """Of the workers, by rank."""
        return {rank: child.pid for rank, child in self.workers.items()}

    def kill(self) -> None:
        for child in self.all:
            child.signal(signal.SIGKILL)
