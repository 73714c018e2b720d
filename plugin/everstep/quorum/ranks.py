"""The group's own collectives for decisions: over Gloo on the CPU, whatever the gradients travel on."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from everstep.quorum.errors import GroupBroken


class GroupRanks:
    """Implements `everstep.step.interfaces.Ranks` on a process group of all ranks of this job.

    Args:
        timeout: longest that one rank waits for another. Rank 0 waits for quorums while the others wait for it.
    """

    def __init__(self, timeout: timedelta) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._group: Any = dist.new_group(backend="gloo", timeout=timeout) if self.size > 1 else None

    def gather(self, words: Sequence[int]) -> list[list[int]]:
        """See `Ranks.gather`."""
        if self._group is None:
            return [list(words)]
        mine = torch.tensor(words, dtype=torch.int64)
        everyone = torch.empty(self.size * len(words), dtype=torch.int64)
        try:
            dist.all_gather_into_tensor(everyone, mine, group=self._group)
        except Exception as error:
            raise GroupBroken(f"a rank of this group is gone: {error}".partition("\n")[0]) from error
        return everyone.view(self.size, -1).tolist()

    def broadcast(self, payload: bytes) -> bytes:
        """See `Ranks.broadcast`."""
        if self._group is None:
            return payload
        [length, *_] = (row[0] for row in self.gather([len(payload)]))
        letters = torch.zeros(length, dtype=torch.uint8)
        if self.rank == 0:
            letters = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
        try:
            dist.broadcast(letters, 0, group=self._group)
        except Exception as error:
            raise GroupBroken(f"a rank of this group is gone: {error}".partition("\n")[0]) from error
        return letters.numpy().tobytes()
