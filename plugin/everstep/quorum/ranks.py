"""Collectives between the ranks of one group, for its decisions: over Gloo on the CPU, whatever sums the gradients."""

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from everstep.quorum import notes
from everstep.quorum.errors import GroupBroken


class GroupRanks:
    """A process group of all ranks of this job.

    Args:
        timeout: longest wait of one rank for another. While rank 0 waits for a quorum, the others wait for rank 0.
    """

    def __init__(self, timeout: timedelta) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._group: Any = dist.new_group(backend="gloo", timeout=timeout) if self.size > 1 else None

    def gather(self, mine: bytes) -> list[bytes]:
        """Return what every rank gave as `mine`, by rank. A collective, which all ranks must call in the same order.
        Raises GroupBroken."""
        return [mine] if self._group is None else notes.gather(mine, self._gather_padded)

    def _gather_padded(self, mine: bytes, size: int) -> list[bytes]:
        padded = torch.frombuffer(bytearray(mine.ljust(size, b"\0")), dtype=torch.uint8)
        everyone = torch.empty(self.size * size, dtype=torch.uint8)
        try:
            dist.all_gather_into_tensor(everyone, padded, group=self._group)
        except Exception as error:
            raise GroupBroken(f"a rank of this group is gone: {error}".partition("\n")[0]) from error
        return [each.numpy().tobytes() for each in everyone.split(size)]
