"""A rank's side of the CPU snapshots: its group's keeper, its copier, and the way back from memory."""

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from everstep.quorum.heal import HealState
from everstep.run.events import EventLog
from everstep.snapshot.agreement import Agreed, Word
from everstep.snapshot.buffer import SnapshotError
from everstep.snapshot.copier import Copier
from everstep.snapshot.keepers import KeeperError, end_keepers, start_keeper, touch
from everstep.snapshot.layout import Layout, Shard
from everstep.snapshot.location import location_of
from everstep.snapshot.plan import State
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
        run_dir, group, groups, host: of the run; `host` is what the keeper listens on.
        settings: `[snapshot]`.
        token: of the run.
        events: the rank's event log.
        encrypt: fault_tolerance.encrypt, for what keepers send.
    """

    def __init__(
        self,
        run_dir: Path,
        group: int,
        groups: int,
        host: str,
        settings: Snapshot,
        token: bytes,
        events: EventLog,
        encrypt: bool = False,
    ) -> None:
        self._run_dir, self.group, self.groups, self._host = run_dir, group, groups, host
        self._settings, self._events, self._encrypt = settings, events, encrypt
        self.shards: Mapping[str, Shard] = {}
        """`TrainingState.shards()`, once there is a state."""
        self._rank, self._ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self._segment = Segment(Path(settings.segment_dir), run_id(token), group)
        # Beside the building of the trainer: it takes a process.
        self._keeper_start = threading.Thread(target=self._start_keeper, name="keeper-start", daemon=True)
        if int(os.environ.get("LOCAL_RANK", "0")) == 0:
            self._keeper_start.start()
        self._location = location_of(os.environ, socket.gethostname())
        self._copier = Copier(self._segment, self._rank, self._ranks, settings, events.emit, self._start_keeper)

    def _start_keeper(self) -> None:
        """Start this host's keeper of the group, or find it. Training goes on without one; an event says
        so."""
        try:
            place = start_keeper(self._run_dir, self.group, self._host, self._settings, self._encrypt)
            self._events.emit("keeper_found", pid=place.pid, address=place.address)
        except (KeeperError, SnapshotError, OSError) as error:
            self._events.emit("snapshot_failed", reason=str(error))

    def _await_keeper(self) -> None:
        if self._keeper_start.ident is not None:
            self._keeper_start.join()

    def settle(self) -> int:
        """Wait until the last commit's snapshot is taken; the newest step held, -1 for none."""
        self._copier.wait()
        return self._copier.published

    def word(self) -> int:
        """What this group says of its newest snapshot to the others, as a number; a collective of the group."""
        word = _of_all_ranks(self._copier.word())
        # Each rank's own: ranks of one number are coded together, wherever the others of their groups are.
        return replace(word, location=self._location).encode()

    @property
    def agreed(self) -> list[Any]:
        """What all groups know of the snapshots alike; what a joiner should know."""
        return self._copier.agreed.to_json()

    def agree(self, agreed: list[Any]) -> None:
        """Take over what `agreed` was at the group that this one heals from."""
        self._copier.agreed = Agreed.from_json(agreed)

    def committed(self, commit: Commit, words: Mapping[int, int], state: Callable[[], HealState], keep: bool) -> None:
        """Take a snapshot of a step that was just committed, if one is due.

        Args:
            words: of all groups that spoke in this commit.
            keep: a checkpoint will be written of it.
        """

        def now() -> State:
            fresh = state()
            # What is agreed on snapshots is for joiners.
            meta = {name: value for name, value in fresh.meta.items() if name != AGREED_SNAPSHOTS}
            return State(fresh.tensors, meta, fresh.blobs, self.shards)

        touch(self._segment)
        said = {group: word for group, number in words.items() if (word := Word.decode(number)) is not None}
        self._copier.committed(commit.step, commit.history, commit.able, said, now, keep)

    def recover(self, state: HealState, disk_step: int | None) -> HealState | None:
        """The newest state there is, if it is in memory; else None. A collective of the group.

        Args:
            state: this rank's state as it is, for its layout.
            disk_step: newest step of the disk checkpoint.
        """
        self._await_keeper()
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
        self._copier.learn_complete(found.restored.step, found.restored.history)
        tensors = layout.views(torch.from_numpy(found.restored.flat))
        return HealState(tensors=tensors, meta=found.restored.meta, blobs=found.restored.blobs)

    def start_export(self, step: int, folder: str) -> subprocess.Popen:
        """Start the process that writes a checkpoint of the newest state in memory at or after `step` below `folder`.
        It ends with this one."""
        command = [sys.executable, "-m", "everstep.titan.export", str(self._run_dir), folder, "--below"]
        command += ["--not-before", str(step), "--group", str(self.group)]
        with (self._run_dir / "logs" / "export.log").open("ab") as log:
            # Of the devices it needs none.
            environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(sys.path)}
            return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment)

    def close(self, over: bool) -> None:
        """Let go of the segment. `over`: nothing will ever be restored from it, so the keeper is told to
        end."""
        self._await_keeper()  # one that comes up later would not hear that the run is over
        self._copier.close()
        if over and int(os.environ.get("LOCAL_RANK", "0")) == 0:
            end_keepers(self._run_dir, {self.group})


def _of_all_ranks(word: Word) -> Word:
    """What is true of a group if its ranks say these; a collective."""
    free = not word.busy_if_anchor, not word.busy_if_not
    everyone = least_in_group(word.published, word.settled, word.coded, word.able, *free, word.rested)
    published, settled, coded, able, free_if_anchor, free_if_not, rested = map(bool, everyone)
    return Word(published, settled, coded, able, not free_if_anchor, not free_if_not, rested)
