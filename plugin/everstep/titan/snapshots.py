"""One rank's CPU snapshots: copies states to shared memory, watches the host's keeper, and restores states."""

import hashlib
import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch

from everstep.quorum.heal import HealState
from everstep.quorum.request import Quorum
from everstep.run.events import EventLog
from everstep.snapshot.agreement import Agreed, Status
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
"""Key in the meta of a served state for what all groups know about snapshots (`snapshot.agreement.Agreed`)."""


class Snapshots:
    """Takes and restores snapshots of one rank's training state.

    Args:
        run_dir, group: of this rank.
        host: address that the keeper listens on.
        settings: `[snapshot]`.
        token: the run's token.
        events: the rank's event log.
    """

    def __init__(
        self, run_dir: Path, group: int, host: str, settings: Snapshot, token: bytes, events: EventLog
    ) -> None:
        self._run_dir, self.group = run_dir, group
        self._settings, self._events = settings, events
        self.shards: Mapping[str, Shard] = {}
        """`TrainingState.shards()`; the trainer sets it once there is a state."""
        self._rank, self._ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self._segment = Segment.of(settings, run_id(token), group)
        self._restored = False
        """Whether a snapshot of a restored state has been begun, for which `await_snapshot` is to wait."""
        self._location = self._location_of(os.environ, socket.gethostname(), group)
        self.copier = Copier(self._segment, self._rank, self._ranks, settings, events.emit, gather_json)
        failed = lambda why: events.emit("snapshot_failed", reason=why)  # noqa: E731
        self._keeper = KeeperWatch.of_first(run_dir, host, settings, self._segment, events, failed)

    def _location_of(self, environment: Mapping[str, str], host: str, group: int) -> int:
        """Return a number for what is lost together with a group's snapshots: host or group (`failure_domain`)."""
        by_group = self._settings.failure_domain == "group"
        return location_of({}, f"group {group}") if by_group else location_of(environment, host)

    def await_snapshot(self) -> None:
        """After a restore, wait until its snapshot is coded or has failed, for up to `coding_timeout_s` seconds."""
        if self._restored:
            self._restored = False
            self.copier.await_settled(self._settings.coding_timeout_s)

    def status(self) -> int:
        """Return what this group tells the others about its newest snapshot, as a number; a collective of the group."""
        status = self.copier.status()
        settled, coded, able = map(bool, least_in_group(status.settled, status.coded, status.able))
        # `location` and `blamed_index` are each rank's own: parity is made over a rank column, and other ranks of the
        # same groups may be on other hosts.
        return replace(status, settled=settled, coded=coded, able=able, location=self._location).encode()

    def committed(self, commit: Commit, statuses: Mapping[int, int], state: Callable[[], HealState]) -> None:
        """Take a snapshot of a step that was just committed, if one is due. A collective of the group.

        Args:
            statuses: group id -> its encoded `Status`; 0 for groups that sent none with this commit.
        """
        said = {group: status for group, number in statuses.items() if (status := Status.decode(number)) is not None}
        taken = lambda: self._to_snapshot(state())  # noqa: E731
        self.copier.committed(commit.step, commit.history, commit.able, said, taken)

    def _to_snapshot(self, state: HealState) -> State:
        return State(state.tensors, state.meta, state.blobs, self.shards)

    def restored(self, step: int, history: int, quorum: Quorum, state: HealState) -> None:
        """Take a snapshot of the state that every group of a quorum has just restored."""
        start = hashlib.sha256(quorum.key.encode()).hexdigest()[:16]
        statuses = {}
        for member in quorum.members:
            host = member.state_addresses[self._rank].rpartition(":")[0]
            statuses[member.group] = Status(location=self._location_of({}, host, member.group))
        self._restored = True
        self.copier.restored((step, history, start), quorum.groups, statuses, self._to_snapshot(state))

    def recover(self, state: HealState, disk_step: int | None) -> HealState | None:
        """Return the newest state of the run if it is in memory, else None. A collective of the group.

        Args:
            state: this rank's current state, of which only the layout is used.
            disk_step: step of the newest checkpoint on disk; None if there is none.
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
        self.copier.agreed = Agreed(anchor=found.decision.anchor)
        tensors = layout.views(torch.from_numpy(found.restored.flat))
        return HealState(tensors=tensors, meta=found.restored.meta, blobs=found.restored.blobs)

    def close(self, *, over: bool, leaves: bool) -> None:
        """Finish the snapshot in progress and release the segment. If this group `leaves` and others go on, those on
        its host remove its snapshots once a newer one is coded. Else, if the run is `over` and needs nothing from
        memory again, tell all its keepers to end."""
        if self._keeper is not None:
            self._keeper.end()  # a keeper that it started later would not hear that the run is over
        self.copier.close()
        if leaves:
            self._segment.leave(self._rank)
        elif over and self._keeper is not None:
            end_keepers(self._run_dir)
