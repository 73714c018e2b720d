"""The copier: a trainer's part of its committed state into the segment, behind the next step's back.

After a commit, `committed` notes what is to be copied and returns; a thread copies, computes checksums and
publishes. The state's tensors do not change until the next optimizer step, so the trainer has only to call
`wait` before it votes on that step. Called there, and not after the vote, a commit also proves something to
every group: all groups that voted have published their parts of the steps before. That is how a copier knows
which step is complete on all keepers, and so which of its two buffers it may overwrite, without asking anyone.
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from everstep.snapshot.buffer import BufferWriter, Header, SnapshotError, chunk_digests, pack_sections
from everstep.snapshot.mapped import MappedBuffer
from everstep.snapshot.plan import Plan, State
from everstep.snapshot.restore import pack_own
from everstep.snapshot.section import Snapshot
from everstep.snapshot.segment import BUFFERS, Notes, Segment, check_room, memory_needed

KEEPER_SILENT_S = 5.0
GATE_POLL_S = 0.02
KEEP_S = 10.0
"""How long a snapshot that is to become a checkpoint waits for its reader."""


class Emit(Protocol):
    """`report.events.EventLog.emit`."""

    def __call__(self, kind: str, step: int | None = None, **fields: Any) -> Any: ...


@dataclass(frozen=True)
class Standing:
    """What is known of one buffer when the next is to be written."""

    sequence: int
    complete: bool
    """Every member of its step has published its part."""
    sound: bool
    """The keeper has not found it damaged."""
    coded: bool
    """The keeper has published parity over it."""
    coding: bool
    """The keeper is verifying it or coding parity over it now."""
    held: bool = False
    """Somebody reads it, or is about to, to write a checkpoint."""


def buffer_to_overwrite(buffers: Sequence[Standing | None]) -> int | None:
    """Which buffer the next snapshot goes to, so that the newest complete and the newest coded step survive it.

    None: neither may go yet, since the younger buffer's parity is under way and the older one's is what there
    is, or the older one is held.
    """
    for index, buffer in enumerate(buffers):
        if buffer is None or not buffer.sound:
            return index
    standing = {index: buffer for index, buffer in enumerate(buffers) if buffer is not None}
    older, younger = sorted(standing, key=lambda index: standing[index].sequence)
    if not standing[younger].complete:
        return younger
    if standing[older].held or (standing[younger].coding and standing[older].coded):
        return None
    return older


class Copier:
    """One rank's snapshots. Not for use by two threads at once."""

    def __init__(
        self,
        segment: Segment,
        rank: int,
        ranks: int,
        settings: Snapshot,
        emit: Emit,
        revive: Callable[[], None] = lambda: None,
    ) -> None:
        """`emit` receives the events snapshot, snapshot_skipped and snapshot_failed. `revive` is called, in a
        thread of its own, when the keeper has fallen silent."""
        self._revive = revive
        self._reviver: threading.Thread | None = None
        self._revive_after = time.monotonic() + KEEPER_SILENT_S
        self._segment, self._rank, self._ranks = segment, rank, ranks
        self._settings, self._emit = settings, emit
        self._buffers = [MappedBuffer(BufferWriter(segment.file("data", rank, i))) for i in range(BUFFERS)]
        self._complete: tuple[int, str] | None = None
        self._newest: tuple[int, str, tuple[int, ...]] | None = None
        self._damaged: set[int] = set()
        self._kept: tuple[int, float] = (-1, 0.0)
        self._plan: Plan | None = None
        self._last_failure = ""
        self._condition = threading.Condition()
        self._job: _Job | None = None
        self._hurry = False
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="snapshot-copier", daemon=True)
        self._thread.start()

    @property
    def complete(self) -> tuple[int, str] | None:
        """Step and lineage of the newest snapshot known to be complete on all keepers."""
        return self._complete

    def learn_complete(self, step: int, lineage: str) -> None:
        """This snapshot is complete: the run was restored from it, or the group that this one healed from
        knows. Buffers found here are then not overwritten before a newer one is complete."""
        self._complete = (step, lineage)

    def committed(
        self,
        step: int,
        lineage: str,
        members: Sequence[int],
        held: int,
        state: Callable[[], State],
        keep: bool = False,
    ) -> bool:
        """Tell that a step was committed; take a snapshot of it if it is due. Returns whether one was begun.

        Args:
            step: the committed step.
            lineage: a string that is the same in all groups which committed this step together, and another
                when the step is committed again after the run went back.
            members: the groups that committed, all of which hold the state now.
            held: the step that was `published` on all of them when they voted; -1 if they differed.
            state: called if a snapshot is due. Its tensors must not change before `wait` has returned.
            keep: a checkpoint is to be written of this step: take it in any case, and do not overwrite it
                before it has been read or `KEEP_S` are over. To be told alike in all groups.
        """
        self.wait()
        self._learn(frozenset(members), held)
        if step % self._settings.interval and not keep:
            return False
        began = time.perf_counter()
        what = state()
        ready = None
        device = next((t.device for t in what.tensors.values() if t.is_cuda), None)
        if device is not None:
            ready = torch.cuda.Event()
            ready.record(torch.cuda.current_stream(device))
        job = _Job(step, lineage, tuple(sorted(members)), what, device, ready, keep)
        job.blocked_s = time.perf_counter() - began
        with self._condition:
            self._job, self._hurry = job, False
            self._condition.notify_all()
        return True

    def wait(self) -> None:
        """Block until the snapshot under way is published (or given up). Call it before each vote."""
        began = time.perf_counter()
        with self._condition:
            job = self._job
            if job is None:
                return
            self._hurry = True
            self._condition.notify_all()
            self._condition.wait_for(lambda: job.done)
            self._job = None
        job.blocked_s += time.perf_counter() - began
        self._report(job)

    def close(self) -> None:
        """Finish the snapshot under way and let go of the segment, which stays."""
        self.wait()
        with self._condition:
            self._closed = True
            self._condition.notify_all()
        self._thread.join()
        for buffer in self._buffers:
            buffer.release()

    @property
    def published(self) -> int:
        """The newest step that this process has published; -1 for none. What it found there does not
        count."""
        return self._newest[0] if self._newest else -1

    def _learn(self, members: frozenset[int], held: int) -> None:
        """From a commit: whether every member of the newest snapshot had published it when it voted."""
        if self._newest is not None and self._newest[0] == held and members.issuperset(self._newest[2]):
            self._complete = self._newest[:2]

    def _report(self, job: "_Job") -> None:
        if job.outcome == "taken":
            self._last_failure = ""
            self._emit(
                "snapshot",
                job.step,
                bytes=job.copied_bytes,
                copy_s=round(job.copy_s, 6),
                blocked_s=round(job.blocked_s, 6),
                members=list(job.members),
            )
        elif job.outcome == "skipped":
            self._emit("snapshot_skipped", job.step, reason=job.reason)
        elif job.reason != self._last_failure:
            self._last_failure = job.reason  # said once, not at every step
            self._emit("snapshot_failed", job.step, reason=job.reason)

    def _run(self) -> None:
        while True:
            with self._condition:
                self._condition.wait_for(lambda: self._closed or (self._job is not None and not self._job.done))
                job = self._job
                if job is None or job.done:
                    return
            try:
                self._take(job)
            except (SnapshotError, RuntimeError, OSError, ValueError, TypeError) as error:
                # Training goes on without this snapshot; the event says so.
                job.outcome, job.reason = "failed", str(error)
            finally:
                with self._condition:
                    job.done = True
                    self._condition.notify_all()

    def _take(self, job: "_Job") -> None:
        self._look_after_keeper()
        index = self._gate()
        if index is None:
            job.outcome = "skipped"
            if any(buffer is not None and buffer.held for buffer in self._standings()):
                job.reason = "the older buffer is being written to disk, and the younger is the newest step"
            else:
                job.reason = (
                    "parity of the step before is still under way, and the older buffer holds the last coded one"
                )
            return
        began = time.perf_counter()
        plan = self._plan
        if plan is None or not plan.fits(job.state, job.members, self._settings):
            plan = self._plan = Plan(
                job.state, job.members, self._segment.group, self._rank, self._ranks, self._settings
            )
        own = pack_own(job.state.meta, job.state.blobs)
        tail, places = pack_sections({"own": own, "layout": plan.layout_json}, plan.part[1] - plan.part[0])
        size = plan.part[1] - plan.part[0] + len(tail)
        self._make_room(size, plan)
        sequence = self._next_sequence()
        buffer = self._buffers[index]
        buffer.reserve(size, job.device)
        buffer.writer.begin()
        plan.copy(buffer.payload(), job.device, job.ready)
        payload = buffer.writer.payload(size)
        payload[size - len(tail) :] = tail
        header = Header(
            run=self._segment.run,
            kind="data",
            group=self._segment.group,
            rank=self._rank,
            ranks=self._ranks,
            step=job.step,
            lineage=job.lineage,
            members=job.members,
            parity=plan.parity,
            topology=plan.topology,
            state_bytes=plan.layout.size,
            part=plan.part,
            sections={"part": (0, plan.part[1] - plan.part[0]), **places},
            sequence=sequence,
            taken_at=time.time(),
            payload_bytes=size,
        )
        if job.keep:
            self._kept = (sequence, time.monotonic() + KEEP_S)
        buffer.writer.publish(header, chunk_digests(payload))
        self._newest = (job.step, job.lineage, job.members)
        job.outcome, job.copied_bytes, job.copy_s = "taken", size, time.perf_counter() - began

    def _gate(self) -> int | None:
        """The buffer to write, once one is free; None when the trainer wants to go on before that."""
        while True:
            index = buffer_to_overwrite(self._standings())
            if index is not None:
                return index
            with self._condition:
                if self._hurry:
                    return None
                self._condition.wait(GATE_POLL_S)

    def _look_after_keeper(self) -> None:
        now = time.monotonic()
        if now - self._segment.read_notes(self._rank).heartbeat < KEEPER_SILENT_S or now < self._revive_after:
            return
        if self._reviver is None or not self._reviver.is_alive():
            self._revive_after = now + KEEPER_SILENT_S
            # Beside the copy: a process takes its time to start, and the trainer may be waiting for the copy.
            self._reviver = threading.Thread(target=self._revive, name="keeper-reviver", daemon=True)
            self._reviver.start()

    def _standings(self) -> list[Standing | None]:
        headers = self._segment.headers("data", self._rank)
        coded = {h.identity for h in self._segment.headers("parity", self._rank) if h}
        notes = self._segment.read_notes(self._rank)
        return [self._standing(header, coded, notes) if header else None for header in headers]

    def _standing(self, header: Header, coded: set, notes: Notes) -> Standing:
        alive = time.monotonic() - notes.heartbeat < KEEPER_SILENT_S
        dealt = notes.sequence == header.sequence
        if dealt and not notes.sound:
            self._damaged.add(header.sequence)
        return Standing(
            sequence=header.sequence,
            complete=(header.step, header.lineage) == self._complete,
            sound=header.sequence not in self._damaged,
            coded=header.identity in coded,
            coding=alive and header.parity > 0 and (notes.sequence < header.sequence or (dealt and not notes.settled)),
            held=(alive and notes.holding == header.sequence) or self._awaits_reader(header, notes),
        )

    def _awaits_reader(self, header: Header, notes: Notes) -> bool:
        sequence, until = self._kept
        return header.sequence == sequence and notes.held != sequence and time.monotonic() < until

    def _next_sequence(self) -> int:
        # By the clock, so that no number comes again after a publication that was broken off: the keeper goes
        # by it.
        newest = max((h.sequence for h in self._segment.headers("data", self._rank) if h), default=0)
        return max(newest + 1, time.time_ns())

    def _make_room(self, size: int, plan: Plan) -> None:
        self._segment.create()  # it is there, unless somebody removed it
        if any(buffer.writer.capacity < size for buffer in self._buffers):
            needed = memory_needed(size, len(plan.members), plan.parity) - self._segment.bytes_of(self._rank)
            check_room(self._segment.path, needed, int(self._settings.memory_reserve_gb * 2**30))


@dataclass
class _Job:
    step: int
    lineage: str
    members: tuple[int, ...]
    state: State
    device: torch.device | None
    ready: torch.cuda.Event | None
    """Recorded on the compute stream at the commit: what the copy must come after."""
    keep: bool = False
    done: bool = False
    outcome: str = "failed"
    reason: str = ""
    copied_bytes: int = 0
    copy_s: float = 0.0
    blocked_s: float = 0.0
