"""The copier: copies a trainer's part of its committed state to the segment, while the next step is computed.

After a commit, `committed` returns at once; the copier's thread copies the part, computes checksums and publishes it.
The state's tensors do not change until the next optimizer step, so the trainer has only to call `wait` before that.
The next forward pass may change persistent buffers, so `committed` copies those before it returns.
"""

import itertools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from queue import SimpleQueue
from typing import Any

import torch

from everstep.quorum.streams import Event, Streams, streams_of
from everstep.run.events import named
from everstep.snapshot.agreement import Agreed, Status, conclude, members_of
from everstep.snapshot.buffer import BufferWriter
from everstep.snapshot.coding import SLOWEST_BYTES_S
from everstep.snapshot.header import Header, Moment, pairs_of
from everstep.snapshot.layout import VOLATILE, CopyPlan, State
from everstep.snapshot.recovery import Share
from everstep.snapshot.restore import pack_own, whose
from everstep.snapshot.section import Snapshot
from everstep.snapshot.segment import KEEPER_SILENT_S, Segment

RETRY_S = 30.0
"""Seconds that a group stays out of snapshots after it could not keep up, or could not copy its part."""
POLL_S = 0.01
Emit = Callable[..., Any]
"""`run.events.EventLog.emit`."""


class Copier:
    """Takes one rank's snapshots. Not thread-safe.

    Args:
        emit: receives the events snapshot, snapshot_skipped and snapshot_failed, and on rank 0 snapshot_unprotected and
            snapshot_protected.
        share: see `recovery.Share`.
    """

    def __init__(
        self, segment: Segment, rank: int, ranks: int, settings: Snapshot, emit: Emit, share: Share = lambda one: [one]
    ) -> None:
        self._segment, self._rank, self._ranks = segment, rank, ranks
        self._settings, self._emit, self._share = settings, emit, share
        reserve_bytes = int(settings.memory_reserve_gb * 2**30)
        self._buffers = [BufferWriter(path, reserve_bytes) for path in segment.files("data", rank)]
        self.agreed = Agreed()
        """What all groups know about the snapshots. A joiner copies it from the group that it heals from."""
        self._newest: Header | None = None
        self._published_at = 0.0
        """time.monotonic() of the last publication at which the keeper was not silent, or else of the first one."""
        self._late_at = 0.0
        """time.monotonic() at which the keeper must have taken up the newest snapshot."""
        self._unable_until = 0.0
        self._plan: CopyPlan | None = None
        self._streams: Streams | None = None
        self._volatile: dict[str, torch.Tensor] = {}
        self._job: _Job | None = None
        """The last snapshot that was begun."""
        self._begun: SimpleQueue[_Job | None] = SimpleQueue()
        # One thread for all snapshots: the trainer would have to wait for a new one to start.
        self._thread = threading.Thread(target=self._work, name="snapshot-copier", daemon=True)
        self._thread.start()

    @property
    def idle(self) -> bool:
        """Whether nothing is being copied or published."""
        return self._job is None or self._job.over.is_set()

    def status(self) -> Status:
        """Return what this group tells all groups, before the next commit, of its last snapshot."""
        under_way = not self.idle  # read first: a job that is over has set all that is read below
        taken, header = self.agreed.taken, self._newest
        able = time.monotonic() >= self._unable_until
        if taken is None or header is None or header.moment != taken or under_way:
            return Status(settled=not under_way, able=able)
        notes = self._segment.read_notes(self._rank)
        dealt = notes.sequence == header.sequence
        # A keeper that has just been started has written no notes yet.
        silent = notes.is_silent and time.monotonic() - self._published_at > KEEPER_SILENT_S
        over = dealt and notes.settled
        late = not dealt and time.monotonic() > self._late_at  # such as a keeper of another version
        settled = over or silent or late
        coded = over and notes.coded
        blamed = notes.blamed_group if over and not silent else self._segment.group
        blamed_index = header.parity_group.index(blamed) if blamed in header.parity_group else -1
        return Status(settled=settled, coded=coded, able=able, blamed_index=-1 if coded else blamed_index)

    def committed(
        self, step: int, history: int, groups: Sequence[int], statuses: Mapping[int, Status], state: Callable[[], State]
    ) -> bool:
        """Note a committed step, and begin a snapshot of it if one is due. Returns whether it began one. A collective.

        A snapshot is due at every interval, and at once if its members change or no snapshot is coded.

        Args:
            step: the committed step.
            history: the state's history, 64 bits: equal in all groups that committed this step together, different
                if the run went back and committed the step again.
            groups: ids that committed and hold the state now; without this group while it catches up after a heal.
            statuses: the statuses that groups sent before the vote; the same mapping in all of them.
            state: called if a snapshot is due. Its tensors must not change before `wait` has returned.
        """
        self.wait()
        waiting, left_out = self._conclude(statuses)
        members = members_of(groups, statuses, left_out)
        due = step % self._settings.interval == 0
        if not due and self.agreed.anchor is not None and members == self.agreed.members:
            return False
        if waiting:
            if due:
                self._emit("snapshot_skipped", step, reason=waiting)
            return False
        return self._begin((step, history, ""), members, statuses, state)

    def restored(self, moment: Moment, groups: Sequence[int], statuses: Mapping[int, Status], state: State) -> None:
        """Take a snapshot of the state that these groups have just restored, so that it is coded before they go on. The
        snapshot that they restored stays until then."""
        self._begin(moment, members_of(groups, statuses, frozenset()), statuses, lambda: state)

    def await_settled(self, patience_s: float) -> None:
        """Wait until this host has coded or given up the last snapshot, at most `patience_s` seconds."""
        deadline = time.monotonic() + patience_s
        while self.agreed.taken is not None and not self.status().settled and time.monotonic() < deadline:
            time.sleep(POLL_S)

    def wait(self) -> None:
        """Block until the state may change; report the last snapshot. Call this before each optimizer step."""
        job, began = self._job, time.perf_counter()
        if job is None:
            return
        if not job.copied.is_set():
            job.copied.wait()
            job.blocked_s += time.perf_counter() - began
        if job.told:
            told, job.told = job.told, None
            self._emit("snapshot", job.moment[0], blocked_s=round(job.blocked_s, 6), **told)

    def close(self) -> None:
        """Finish the snapshot under way and close the segment's files, which stay."""
        self._begun.put(None)
        self._thread.join()
        self.wait()
        for buffer in self._buffers:
            buffer.release()

    def _conclude(self, statuses: Mapping[int, Status]) -> tuple[str, frozenset[int]]:
        """Note what became of the last snapshot. Returns why there cannot be another now, and which groups are left
        out, equal in all ranks of the group. A collective of the group if the last snapshot was given up."""
        before, size, parity = self.agreed, self._settings.parity_group, self._settings.parity
        found = conclude(before, statuses, size, parity)
        self.agreed = found.agreed
        over = before.taken if self.agreed.taken is None else None
        if found.protected:
            self._segment.remove_left(self._rank, before.members)
        if over is not None and not found.protected:
            # Each rank column is coded separately, so a rank knows only the failures of its own column.
            of_ranks = self._share(sorted(found.left_out))
            found = replace(found, left_out=frozenset(itertools.chain(*of_ranks)))
        if self._segment.group in found.left_out:
            self._unable_until = time.monotonic() + RETRY_S
        if self._rank == 0 and over is not None:
            if found.protected:
                domains = before.domains(size, parity)
                members, exposed = list(domains.members), list(domains.exposed)
                self._emit("snapshot_protected", over[0], members=members, survives=domains.survives, exposed=exposed)
            else:
                late = f"{named(sorted(found.left_out))} did not keep up" if found.left_out else ""
                notes, newest = self._segment.read_notes(self._rank), self._newest
                ignored = newest is not None and newest.moment == over and notes.sequence != newest.sequence
                own = f"the keeper of group {self._segment.group} did not take it up" if ignored else notes.reason
                why = "; ".join(filter(None, (late, own)))
                coded = self.agreed.anchor[0] if self.agreed.anchor else None
                reason = why or "another group did not finish it"
                self._emit("snapshot_unprotected", over[0], coded_step=coded, reason=reason)
        return found.waiting, found.left_out

    def _begin(
        self, moment: Moment, members: tuple[int, ...], statuses: Mapping[int, Status], state: Callable[[], State]
    ) -> bool:
        began = time.perf_counter()
        self.agreed = self.agreed.take(moment, members, statuses)
        if self._segment.group not in members:
            self._emit("snapshot_skipped", moment[0], reason="this group could not keep up, or is still healing")
            return False
        what = self._copy_volatile(state())
        self._streams = self._streams or streams_of(what.device)
        if self._job is not None:
            self._job.over.wait()
        job = self._job = _Job(moment, self.agreed, what, self._streams.record())
        self._begun.put(job)
        job.blocked_s = time.perf_counter() - began
        return True

    def _copy_volatile(self, state: State) -> State:
        """Return the state with copies of the tensors that the next forward pass may change."""
        fresh = {name: tensor for name, tensor in state.tensors.items() if name.startswith(VOLATILE)}
        for name, tensor in fresh.items():
            old = self._volatile.get(name)
            if old is None or (old.shape, old.dtype, old.device) != (tensor.shape, tensor.dtype, tensor.device):
                self._volatile[name] = tensor.detach().clone(memory_format=torch.contiguous_format)
            else:
                old.copy_(tensor.detach())
        copies = {name: self._volatile[name] for name in fresh}
        return replace(state, tensors={**state.tensors, **copies}) if fresh else state

    def _work(self) -> None:
        while (job := self._begun.get()) is not None:
            try:
                self._take(job)
            except Exception as error:  # noqa: BLE001 - training goes on without this snapshot; the event says so
                self._unable_until = time.monotonic() + RETRY_S
                self._emit("snapshot_failed", job.moment[0], reason=str(error) or type(error).__name__)
            finally:
                job.copied.set()
                job.over.set()

    def _take(self, job: "_Job") -> None:
        began, group = time.perf_counter(), self._segment.group
        members = job.agreed.members
        plan = self._plan
        if plan is None or not plan.fits(job.state, members):
            plan = self._plan = CopyPlan(job.state, members, group, self._rank, self._ranks)
        domains = job.agreed.domains(self._settings.parity_group, self._settings.parity)
        parity_group = domains.group_of(group)
        step, history, start = job.moment
        part_bytes = plan.part[1] - plan.part[0]
        header = Header(
            run=self._segment.run,
            kind="data",
            group=group,
            rank=self._rank,
            ranks=self._ranks,
            step=step,
            history=history,
            start=start,
            shared_by=pairs_of(members),
            parity=domains.rows(parity_group),
            parity_group=parity_group,
            topology=plan.topology,
            state_bytes=plan.layout.size,
            part=plan.part,
            last_section=0,
            sequence=self._next_sequence(),
        )
        own = pack_own(job.state.meta, job.state.blobs, **whose(header))
        end = part_bytes + len(own)
        size = end + len(plan.layout_json)
        header = replace(header, last_section=end, payload_bytes=size)
        self._segment.create()  # does nothing unless the directory was removed
        self._segment.claim(self._rank)
        buffer = self._buffers[buffer_to_write(job.agreed.anchor, self._segment.headers("data", self._rank))]
        buffer.reserve(size)
        buffer.begin()
        assert self._streams is not None
        tail = own + plan.layout_json
        table = plan.copy(buffer.payload(size), tail, self._streams, job.ready, job.copied.set)
        self._newest = buffer.publish(header, table)
        slowest_s = size * len(self._segment.columns()) / SLOWEST_BYTES_S  # it may code all other ranks' parts first
        # Twice, because a keeper may be busy with the snapshot of before as long as with this one.
        self._late_at = time.monotonic() + 2 * (self._settings.coding_timeout_s + slowest_s)
        self._segment.ring()
        job.told = {"bytes": size, "copy_s": round(time.perf_counter() - began, 6), "members": list(members)}
        if self._published_at == 0.0 or not self._segment.read_notes(self._rank).is_silent:
            self._published_at = time.monotonic()

    def _next_sequence(self) -> int:
        # From the clock, so that no number is used twice, even after an interrupted publication: the keeper tells
        # publications apart by it.
        held = (*self._segment.headers("data", self._rank), self._newest)
        return max(time.time_ns(), *(header.sequence + 1 for header in held if header), 0)


def buffer_to_write(anchor: Moment | None, headers: Sequence[Header | None]) -> int:
    """Return the index of the buffer to write: an empty or damaged one, else the oldest that is not the anchor."""

    def order(index: int) -> tuple[bool, bool, int]:
        header = headers[index]
        return (False, False, 0) if header is None else (True, header.moment == anchor, header.sequence)

    return min(range(len(headers)), key=order)


@dataclass
class _Job:
    """One snapshot, from its begin to its event."""

    moment: Moment
    agreed: Agreed
    """What was agreed when the snapshot began."""
    state: State
    ready: Event | None
    """Recorded on the compute stream at the commit; the copy from a device must come after it."""
    copied: threading.Event = field(default_factory=threading.Event)
    """Set once the state may change."""
    over: threading.Event = field(default_factory=threading.Event)
    """Set once the snapshot is published or has failed."""
    blocked_s: float = 0.0
    told: dict[str, Any] | None = None
    """Fields of the event `snapshot`, from the publication until the event is written."""
