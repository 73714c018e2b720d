"""A rank's side of the CPU snapshots: its group's keeper, its copier, and the way back from memory."""

import hashlib
import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from everstep.quorum.heal import HealState
from everstep.quorum.request import Quorum
from everstep.run.events import EventLog
from everstep.snapshot.agreement import Agreed, Word
from everstep.snapshot.copier import Copier
from everstep.snapshot.keepers import KeeperWatch, end_keepers
from everstep.snapshot.layout import Layout, Shard, State
from everstep.snapshot.parity import location_of
from everstep.snapshot.recovery import recover
from everstep.snapshot.section import Snapshot
from everstep.snapshot.segment import Segment, run_id
from everstep.step.interfaces import Commit
from everstep.titan.group import gather_json, least_in_group

AGREED_SNAPSHOTS = "agreed_snapshots"
"""Where in a served state's meta a joiner finds what all groups know of their snapshots."""


class Snapshots:
    """Snapshots of one rank's training state.

    Args:
        run_dir, group, host: of the run; `host` is what the keeper listens on.
        settings: `[snapshot]`.
        token: of the run.
        events: the rank's event log.
    """

    def __init__(
        self, run_dir: Path, group: int, host: str, settings: Snapshot, token: bytes, events: EventLog
    ) -> None:
        self._run_dir, self.group, self._address = run_dir, group, host
        self._settings, self._events = settings, events
        self.shards: Mapping[str, Shard] = {}
        """`TrainingState.shards()`, once there is a state."""
        self._rank, self._ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self._segment = Segment.of(settings, run_id(token), group)
        self._restored = False
        """Whether a snapshot of a restored state is on its way."""
        self._location = self._location_of(os.environ, socket.gethostname(), group)
        self._copier = Copier(self._segment, self._rank, self._ranks, settings, events.emit, gather_json)
        failed = lambda why: events.emit("snapshot_failed", reason=why)  # noqa: E731
        self._keeper = KeeperWatch.of_first(run_dir, host, settings, self._segment, events, failed)

    def _location_of(self, environment: Mapping[str, str], host: str, group: int) -> int:
        """What is lost together with a group's snapshots, as `snapshot.failure_domain` has it."""
        by_group = self._settings.failure_domain == "group"
        return location_of({}, f"group {group}") if by_group else location_of(environment, host)

    def settle(self) -> None:
        """After a start, wait until the state that was restored is coded, or for snapshot.coding_timeout_s."""
        if self._restored:
            self._restored = False
            self._copier.await_settled(self._settings.coding_timeout_s)

    def wait(self) -> None:
        """Wait until the state may change."""
        self._copier.wait()

    def word(self) -> int:
        """What this group says of its newest snapshot to the others, as a number; a collective of the group."""
        word = self._copier.word()
        settled, coded, able = map(bool, least_in_group(word.settled, word.coded, word.able))
        # Where it is and for whom it waits is each rank's own: ranks of one number are coded together, wherever the
        # others of their groups are.
        return replace(word, settled=settled, coded=coded, able=able, location=self._location).encode()

    @property
    def agreed(self) -> dict[str, Any]:
        """What all groups know of the snapshots alike; what a joiner should know."""
        return self._copier.agreed.to_json()

    def agree(self, agreed: dict[str, Any]) -> None:
        """Take over what `agreed` was at the group that this one heals from."""
        self._copier.agreed = Agreed.from_json(agreed)

    def committed(self, commit: Commit, words: Mapping[int, int], state: Callable[[], HealState]) -> None:
        """Take a snapshot of a step that was just committed, if one is due. A collective of the group.

        Args:
            words: of all groups that spoke in this commit.
        """
        said = {group: word for group, number in words.items() if (word := Word.decode(number)) is not None}
        taken = lambda: self._to_snapshot(state())  # noqa: E731
        self._copier.committed(commit.step, commit.history, commit.able, said, taken)

    def _to_snapshot(self, state: HealState) -> State:
        return State(state.tensors, state.meta, state.blobs, self.shards)

    def restored(self, step: int, history: int, quorum: Quorum, state: HealState) -> None:
        """Take a snapshot of the state that the groups of a quorum have just restored, each for itself."""
        start = hashlib.sha256(quorum.key.encode()).hexdigest()[:16]
        words = {}
        for member in quorum.members:
            host = member.doors[self._rank].rpartition(":")[0]
            words[member.group] = Word(location=self._location_of({}, host, member.group))
        self._restored = True
        self._copier.restored((step, history, start), quorum.groups, words, self._to_snapshot(state))

    def recover(self, state: HealState, disk_step: int | None) -> HealState | None:
        """The newest state there is, if it is in memory; else None. A collective of the group.

        Args:
            state: this rank's state as it is, for its layout.
            disk_step: newest step of the disk checkpoint.
        """
        if self._keeper is not None:
            self._keeper.looked.wait()
        layout = Layout.of(state.tensors, self.shards)
        timeout = timedelta(seconds=self._settings.transfer_timeout_s)
        found = recover(
            self._run_dir,
            group=self.group,
            rank=self._rank,
            ranks=self._ranks,
            layout=layout,
            disk_step=disk_step,
            timeout=timeout,
            patience=timedelta(seconds=self._settings.restore_wait_s),
            share=gather_json,
        )
        self._events.emit("recovery", found.decision.step, **found.event)
        if found.restored is None:
            return None
        self._copier.agreed = Agreed(anchor=found.decision.anchor)
        tensors = layout.views(torch.from_numpy(found.restored.flat))
        return HealState(tensors=tensors, meta=found.restored.meta, blobs=found.restored.blobs)

    def close(self, *, over: bool, leaves: bool) -> None:
        """Let go of the segment. `over`: nothing of the run will ever be restored from memory, so this host's keeper is
        told to end. `leaves`: this group alone has ended, and its part is given up."""
        if self._keeper is not None:
            self._keeper.end()  # one that came up later would not hear that the run is over
        self._copier.close()
        if leaves:
            self._segment.drop(self._rank)
        elif over and self._keeper is not None:
            end_keepers(self._run_dir)
