"""The copier: a trainer's part of its committed state into the segment, behind the next step's back.

After a commit, `committed` notes what is to be copied and returns; a thread copies, computes checksums and publishes.
The state's tensors do not change until the next optimizer step, so the trainer has only to call `wait` before it votes
on that step. What the next forward may change already, persistent buffers, is set aside before `committed` returns.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch

from everstep.snapshot.agreement import Agreed, Word, learn, members_of
from everstep.snapshot.buffer import BufferWriter, chunk_digests
from everstep.snapshot.header import Header
from everstep.snapshot.mapped import MappedBuffer
from everstep.snapshot.plan import VOLATILE, Plan, State, Throttle, meta_digest
from everstep.snapshot.restore import pack_own
from everstep.snapshot.room import make_room, memory_needed
from everstep.snapshot.section import Snapshot
from everstep.snapshot.segment import Notes, Segment

KEEPER_SILENT_S = 5.0
WRITING_S = 1.0
"""How long a buffer that its keeper exchanges is waited for; it takes microseconds."""
KEEP_S = 10.0
"""How long a snapshot that is to become a checkpoint waits for its reader."""
RETRY_S = 30.0
"""How long a group that had no room lets the others go on without it before it tries again."""
ALONE = "no other group takes part that it could be coded with"


class Emit(Protocol):
    """`run.events.EventLog.emit`."""

    def __call__(self, kind: str, step: int | None = None, **fields: Any) -> Any: ...


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
        """`emit` receives the events snapshot, snapshot_skipped, snapshot_failed, snapshot_unprotected and
        snapshot_protected. `revive` is called, in a thread of its own, when the keeper has fallen silent."""
        self._revive = revive
        self._reviver: threading.Thread | None = None
        self._revive_after = time.monotonic() + KEEPER_SILENT_S
        self._segment, self._rank, self._ranks = segment, rank, ranks
        self._settings, self._emit = settings, emit
        self._buffers = [MappedBuffer(BufferWriter(path)) for path in segment.files("data", rank)[: settings.buffers]]
        self.agreed = Agreed()
        """What all groups know alike; a joiner's is replaced by that of the group it heals from."""
        self._newest: Header | None = None
        self._published_at = 0.0
        """When the last snapshot was published whose keeper was not known to be silent."""
        self._unable_until = 0.0
        self._protected: int | None = None
        self._exposed_since: int | None = None
        self._kept: tuple[int, float] = (-1, 0.0)
        self._plan: Plan | None = None
        self._aside: dict[str, torch.Tensor] = {}
        self._last_failure = ""
        self._condition = threading.Condition()
        self._job: _Job | None = None
        self._hurry = threading.Event()
        self._closed = False
        self._throttle = Throttle(settings.bandwidth_gb_s * 1e9)
        self._thread = threading.Thread(target=self._run, name="snapshot-copier", daemon=True)
        self._thread.start()

    def learn_complete(self, step: int, history: int) -> None:
        """The run was restored from this snapshot: it is not overwritten before a newer one is complete and coded."""
        self.agreed = Agreed(anchor=(step, history), whole=(step, history))

    def word(self) -> Word:
        """What this group says of the snapshot taken last, but for where it is; to be told to all groups before the
        next commit."""
        taken, header, notes = self.agreed.taken, self._newest, self._segment.read_notes(self._rank)
        able = time.monotonic() >= self._unable_until
        if_anchor, if_not = self._busy(notes)
        with self._condition:
            under_way = self._job is not None and not self._job.done
        rested = time.monotonic() >= notes.rests_until
        spoken = Word(settled=not under_way, able=able, busy_if_anchor=if_anchor, busy_if_not=if_not, rested=rested)
        if taken is None or header is None or (header.step, header.history) != (taken.step, taken.history):
            return spoken
        if taken.interim:
            return replace(spoken, published=True)
        # A keeper that has only now been started has said nothing yet.
        alive = time.monotonic() - max(notes.heartbeat, self._published_at) < KEEPER_SILENT_S
        dealt = notes.sequence == header.sequence
        why_not = ""
        if not alive or (dealt and notes.settled):
            why_not = (notes.reason if dealt else "") or f"the keeper of group {self._segment.group} is silent"
        coded = header.parity > 0 and dealt and notes.coded
        if header.parity > 0:
            self._note_protection(header, coded, why_not)
        elif self._settings.parity > 0:  # alone, or whole copies
            alone = len(header.members) == 1
            self._note_protection(header, not alone, ALONE if alone else "")
        return replace(
            spoken,
            published=notes.sound if dealt else True,
            settled=not alive or (dealt and notes.settled),
            coded=coded or header.parity == 0,
        )

    def committed(
        self,
        step: int,
        history: int,
        groups: Sequence[int],
        words: Mapping[int, Word],
        state: Callable[[], State],
        keep: bool = False,
    ) -> bool:
        """Tell that a step was committed; take a snapshot of it if it is due. Returns whether one was begun here.

        Args:
            step: the committed step.
            history: of the state, 64 bits: the same in all groups which committed this step together, and another
                when the step is committed again after the run went back.
            groups: that committed and hold the state now; this one is none of them where it applies afterwards what
                they committed while it healed.
            words: of the groups that spoke before the vote; the same mapping in all of them.
            state: called if a snapshot is due. Its tensors must not change before `wait` has returned.
            keep: a checkpoint is to be written of this step: take it in any case, and do not overwrite it
                before it has been read or `KEEP_S` are over. To be told alike in all groups.
        """
        self.wait()
        self.agreed, why_not = learn(self.agreed, words)
        if step % self._settings.interval and not keep:
            return False
        if why_not and not (keep and self.agreed.taken is not None):
            self._emit("snapshot_skipped", step, reason=why_not)
            return False
        began = time.perf_counter()
        members = members_of(groups, words)
        self.agreed = self.agreed.take(step, history, members, words)
        if self._segment.group not in members:
            if self._segment.group in groups:
                self._emit("snapshot_skipped", step, reason="this group had no room for its last snapshot")
            return False
        what = self._set_aside(state())
        ready = None
        device = next((t.device for t in what.tensors.values() if t.is_cuda), None)
        if device is not None:
            ready = torch.cuda.Event()
            ready.record(torch.cuda.current_stream(device))
        locations = {group: words[group].location for group in members if group in words}
        assert self.agreed.taken is not None
        job = _Job(step, history, members, self.agreed.taken.interim, locations, what, device, ready, keep)
        job.blocked_s = time.perf_counter() - began
        with self._condition:
            self._job = job
            self._hurry.clear()
            self._condition.notify_all()
        return True

    def _set_aside(self, state: State) -> State:
        """The state with copies of what the next forward may change."""
        fresh = {name: tensor for name, tensor in state.tensors.items() if name.startswith(VOLATILE)}
        for name, tensor in fresh.items():
            old = self._aside.get(name)
            if old is None or (old.shape, old.dtype, old.device) != (tensor.shape, tensor.dtype, tensor.device):
                self._aside[name] = tensor.detach().clone(memory_format=torch.contiguous_format)
            else:
                old.copy_(tensor.detach())
        aside = {name: self._aside[name] for name in fresh}
        return replace(state, tensors={**state.tensors, **aside}) if fresh else state

    def wait(self) -> None:
        """Block until the snapshot under way is published (or given up). Call it before each vote."""
        began = time.perf_counter()
        with self._condition:
            job = self._job
            if job is None:
                return
            self._hurry.set()
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
        return self._newest.step if self._newest else -1

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
        elif job.reason != self._last_failure:
            self._last_failure = job.reason  # said once, not at every step
            self._emit("snapshot_failed", job.step, reason=job.reason)

    def _note_protection(self, header: Header, coded: bool, why_not: str) -> None:
        """Say from when on this group's snapshots are coded, when they stop being, why, and for how many steps they
        were not. `why_not`: "" as long as the code may still come."""
        if coded:
            since = self._exposed_since
            if since is not None or self._protected is None:
                steps = header.step - since if since is not None else 0
                self._emit("snapshot_protected", header.step, steps=steps, since_step=since)
            self._protected, self._exposed_since = header.step, None
        elif why_not and self._exposed_since is None:
            self._exposed_since = header.step
            self._emit("snapshot_unprotected", header.step, coded_step=self._protected, reason=why_not)

    def _run(self) -> None:
        while True:
            with self._condition:
                self._condition.wait_for(lambda: self._closed or (self._job is not None and not self._job.done))
                job = self._job
                if job is None or job.done:
                    return
            try:
                self._take(job)
            except Exception as error:  # noqa: BLE001 - training goes on without this snapshot; the event says so
                job.outcome, job.reason = "failed", str(error) or type(error).__name__
                self._unable_until = time.monotonic() + RETRY_S
            finally:
                with self._condition:
                    job.done = True
                    self._condition.notify_all()

    def _take(self, job: "_Job") -> None:
        self._look_after_keeper()
        began = time.perf_counter()
        group = self._segment.group
        plan = self._plan
        shared = (self._settings, job.locations)
        if plan is None or not plan.fits(job.state, job.members, *shared):
            plan = self._plan = Plan(job.state, job.members, group, self._rank, self._ranks, *shared)
        part_bytes = plan.part[1] - plan.part[0]
        whose = {"run": self._segment.run, "step": job.step, "history": job.history, "group": group, "rank": self._rank}
        own = pack_own(job.state.meta, job.state.blobs, **whose)
        tail = own + plan.layout_json
        size = part_bytes + len(tail)
        self._make_room(size, plan)
        with self._segment.writing(self._rank, WRITING_S):
            self._write(job, plan, own, tail)
        if self._published_at == 0.0 or self._alive(self._segment.read_notes(self._rank)):
            self._published_at = time.monotonic()
        self._unable_until = 0.0
        job.outcome, job.copied_bytes, job.copy_s = "taken", size, time.perf_counter() - began

    def _write(self, job: "_Job", plan: Plan, own: bytes, tail: bytes) -> None:
        """The part and what goes with it into the buffer whose turn it is."""
        part_bytes = plan.part[1] - plan.part[0]
        size = part_bytes + len(tail)
        sequence = self._next_sequence()
        kept, notes = self._kept_ones(self.agreed.anchor, self.agreed.whole), self._segment.read_notes(self._rank)
        buffer = self._buffers[self._target(kept, self._headers(), notes)]
        buffer.reserve(size, job.device)
        buffer.writer.begin()
        copied = plan.copy(buffer.payload(), job.ready, self._pause)
        buffer.writer.payload(size)[part_bytes:] = tail
        table = np.concatenate([copied.table, chunk_digests(memoryview(tail))])
        header = Header(
            run=self._segment.run,
            kind="data",
            group=self._segment.group,
            rank=self._rank,
            ranks=self._ranks,
            step=job.step,
            history=job.history,
            members=job.members,
            parity=0 if job.interim else plan.parity,
            parity_group=plan.parity_group,
            interim=job.interim,
            topology=plan.topology,
            state_bytes=plan.layout.size,
            part=plan.part,
            part_digest=copied.part_digest,
            witness=plan.witness,
            witness_digest=copied.witness_digest,
            meta_digest=meta_digest(job.state.meta),
            sections={
                "part": (0, part_bytes),
                "own": (part_bytes, part_bytes + len(own)),
                "layout": (part_bytes + len(own), size),
            },
            sequence=sequence,
            taken_at=time.time(),
            payload_bytes=size,
        )
        if job.keep:
            self._kept = (sequence, time.monotonic() + KEEP_S)
        self._newest = buffer.writer.publish(header, table)

    def _pause(self, nbytes: int) -> None:
        if not self._hurry.is_set():
            self._throttle(nbytes)

    def _look_after_keeper(self) -> None:
        now = time.monotonic()
        if now - self._segment.read_notes(self._rank).heartbeat < KEEPER_SILENT_S or now < self._revive_after:
            return
        if self._reviver is None or not self._reviver.is_alive():
            self._revive_after = now + KEEPER_SILENT_S
            # Beside the copy: a process takes its time to start, and the trainer may be waiting for the copy.
            self._reviver = threading.Thread(target=self._revive, name="keeper-reviver", daemon=True)
            self._reviver.start()

    def _headers(self) -> list[Header | None]:
        return self._segment.headers("data", self._rank)[: len(self._buffers)]

    def _kept_ones(self, anchor: tuple[int, int] | None, whole: tuple[int, int] | None) -> set[tuple[int, int] | None]:
        """Steps and histories that are not overwritten, if these are the newest of their kind."""
        return {anchor, whole} if len(self._buffers) > 2 else {anchor}

    @staticmethod
    def _target(keep: set[tuple[int, int] | None], headers: Sequence[Header | None], notes: Notes) -> int:
        """The buffer to write: one that holds nothing or is damaged first, else the oldest that need not be kept."""
        for index, header in enumerate(headers):
            if header is None:
                return index
        known = [header for header in headers if header is not None]
        unsound = [i for i, h in enumerate(known) if notes.sequence == h.sequence and not notes.sound]
        if unsound:
            return unsound[0]
        free = [i for i, h in enumerate(known) if (h.step, h.history) not in keep]
        return min(free or range(len(known)), key=lambda i: known[i].sequence)

    def _busy(self, notes: Notes) -> tuple[bool, bool]:
        """See `Word`."""
        headers, anchor, whole = self._headers(), self.agreed.anchor, self.agreed.whole

        def busy(keep: set[tuple[int, int] | None]) -> bool:
            target = headers[self._target(keep, headers, notes)]
            return target is not None and self._held(target, notes)

        as_it_is = busy(self._kept_ones(anchor, whole))
        if self.agreed.taken is None:
            return as_it_is, False
        taken = self.agreed.taken.step, self.agreed.taken.history
        return busy(self._kept_ones(taken, taken)), as_it_is or busy(self._kept_ones(anchor, taken))

    def _alive(self, notes: Notes) -> bool:
        return time.monotonic() - notes.heartbeat < KEEPER_SILENT_S

    def _held(self, header: Header, notes: Notes) -> bool:
        sequence, until = self._kept
        awaited = header.sequence == sequence and notes.held != sequence and time.monotonic() < until
        return awaited or (self._alive(notes) and notes.holding == header.sequence)

    def _next_sequence(self) -> int:
        # By the clock, so that no number comes again after a publication that was broken off: the keeper goes
        # by it.
        newest = max((header.sequence for header in (*self._headers(), self._newest) if header), default=0)
        return max(newest + 1, time.time_ns())

    def _make_room(self, size: int, plan: Plan) -> None:
        self._segment.create()  # it is there, unless somebody removed it
        if any(buffer.writer.capacity < size for buffer in self._buffers):
            total = memory_needed(size, len(plan.parity_group), plan.parity, len(self._buffers))
            held, reserve = self._segment.bytes_of(self._rank), int(self._settings.memory_reserve_gb * 2**30)
            make_room(self._segment.root, self._segment.path, self._rank, total, held, reserve)


@dataclass
class _Job:
    step: int
    history: int
    members: tuple[int, ...]
    interim: bool
    locations: dict[int, int]
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
