"""The step protocol: one rank's way from a committed step to the next, whatever happens to the other groups.

An attempt is one pass of quorum, agreement, compute, sums and vote (`StepProtocol.attempt`):

1. join a quorum; connect a process group if its members changed. A member that is behind heals from one that is
   not. If that takes long it goes on in the background, and the member takes no slots.
2. exchange rows and make the plan (`ledger.plan`): which slots nobody holds, and who computes them.
3. compute this group's share; gradients accumulate in `param.grad`, losses as sums.
4. sum copies of the gradients over the groups, then the ledger: how often each slot is in the sum, tokens, loss.
5. vote: every slot exactly once, no error. If not, the next attempt keeps what is held: a salvage.
6. commit: the caller divides, clips and steps the optimizer.

Nothing here knows torchtitan: what a slot, a gradient or a state is comes in through `Work`.
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Literal, Protocol

import torch

from everstep.quorum.heal import HealError, HealServer, HealState, fetch
from everstep.quorum.membership import Membership, Quorum, QuorumUnavailable, incarnation
from everstep.quorum.process_group import CrossGroup, CrossGroupError
from everstep.run.events import EventLog
from everstep.step import ledger
from everstep.step.reduction import GradientReducer

HEAL_GATE_TIMEOUT = timedelta(seconds=300)
HEAL_FIRST_S = 0.5
"""A joiner that receives its state within this time takes slots in the same step; the others wait for it that long.
With a larger state it heals while they compute."""


@dataclass(frozen=True, slots=True)
class SlotSums:
    """What a group's held slots add to the step, besides gradients.

    Attributes:
        tokens: valid tokens by slot, float64 [S] on CPU, 0 where the slot is not held.
        loss: sum of their losses by slot, the same form.
        extra: float64 [n] on CPU, n fixed: further sums that the optimizer step needs, such as expert loads.
    """

    tokens: torch.Tensor
    loss: torch.Tensor
    extra: torch.Tensor


class SlotRefused(Exception):
    """A check found the slot's computation wrong and could not repair it: its gradient must not be used."""


class OutOfData(Exception):  # the end of a run, not an error
    """The data ended before this step: the run is over for all groups."""


class Work(Protocol):
    """What the protocol needs from a trainer."""

    @property
    def may_refuse(self) -> bool:
        """Whether `compute` may raise SlotRefused."""
        ...

    def compute(self, step: int, slot: int) -> None:
        """Forward and backward of one slot of `step`; the gradient is added to `param.grad`.

        Raises:
            OutOfData: there is none for this slot. Nothing was added.
            SlotRefused: what was added to `param.grad` is wrong; the same on all ranks of the group.
        """

    def results(self) -> "SlotSums":
        """Of all slots computed since `discard`, summed over the group's ranks; a collective of the group."""

    def discard(self) -> None:
        """Forget all gradients and sums of the step in progress."""

    def notes(self, step: int) -> bytes | None:
        """What the other groups should know after `step`, or None when none of them sends anything now."""

    def noted(self, notes: list[bytes]) -> None:
        """What each group's `notes` said."""

    def settle(self) -> int:
        """Wait until the state may change; the newest step that this rank's snapshots hold, -1 for none."""

    def serve(self) -> HealState:
        """This rank's state, by reference."""

    def heal(self, state: HealState) -> None:
        """Take over another group's state."""


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Named waits of the protocol.

    Attributes:
        quorum: for one quorum.
        reduce: for one sum over the groups, once all of them have computed their share.
        heal: for a joiner's state.
        compute: longest that a group with nothing to compute waits for the others' share.
        give_up: see `GaveUp`.
    """

    quorum: timedelta
    reduce: timedelta
    heal: timedelta
    compute: timedelta
    give_up: timedelta


@dataclass(frozen=True, slots=True)
class Commit:
    """A step that all its slots agree on, ready for the optimizer.

    Attributes:
        step: number of the step, from 1.
        tokens: valid tokens by slot, float64 [S].
        loss: sum of their losses by slot, the same form.
        extra: `SlotSums.extra` over all groups.
        owners: for each slot the group that computed it, -1 if none did.
        groups: groups taking part, in rank order.
        lineage: the same on all groups that committed this step together; another when the step is committed again
            after the run went back.
        held: the step whose snapshot all groups held when they voted; -1 if they differed.
        quorum_id: torchft's id of the quorum.
        once: whether every slot is in the sum exactly once; a slot may be missing under `shrink`.
        saver: the group that writes what a run writes once.
        all_leave: every group asked to stop after this step.
        attempts: how many this group needed.
        compute_s, reduce_s, took_s: of the attempt that committed; reduce_s is what compute did not hide.
    """

    step: int
    tokens: torch.Tensor
    loss: torch.Tensor
    extra: torch.Tensor
    owners: tuple[int, ...]
    groups: tuple[int, ...]
    lineage: str
    held: int
    quorum_id: int
    once: bool
    saver: int
    all_leave: bool
    attempts: int
    compute_s: float
    reduce_s: float
    took_s: float


class Blank(Exception):  # a turn of the protocol, not an error
    """No member of the quorum has any state: it has to come from somewhere else."""


class Left(Exception):
    """This group was asked to leave while there was no quorum to commit another step in."""


class GaveUp(RuntimeError):
    """No step could be committed for `Timeouts.give_up`."""


@dataclass(slots=True)
class _Held:
    """What this group's gradients contain."""

    step: int
    slots: set[int] = field(default_factory=set)
    lost: set[int] = field(default_factory=set)


class _Heal(threading.Thread):
    """Fetches another group's state while this rank takes part in the sums."""

    def __init__(self, membership: Membership, quorum: Quorum, token: bytes, timeout: timedelta) -> None:
        super().__init__(name="heal", daemon=True)
        self._membership, self._quorum, self._token, self._timeout = membership, quorum, token, timeout
        self.state: HealState | None = None
        self.error = ""
        self.took_s = 0.0

    def run(self) -> None:
        begin = time.monotonic()
        try:
            address = self._membership.heal_address(self._quorum, self._timeout)
            self.state = fetch(address, self._token, self._quorum.step, None, self._timeout)
        except (HealError, QuorumUnavailable) as error:
            self.error = str(error)
        self.took_s = time.monotonic() - begin


class StepProtocol:
    """Runs attempts until a step commits.

    Args:
        group: this group's id.
        slots: S.
        on_loss: see `ledger.plan`.
        work: the trainer's side.
        reducer: sums the gradients.
        membership, cross, heal_server: quorums, sums between groups, and where joiners heal from.
        token: of the run; authenticates healing.
        timeouts: the protocol's waits.
        events: the rank's event log.
        beat: called with a phase's name wherever progress is made.
        all_in_group: whether a flag is true on all ranks of the group; a collective of the group.
        asked_to_leave: whether this rank was asked to stop after the next commit.
        device: where the exchanged vectors live (the CPU for Gloo, the accelerator for NCCL).
    """

    def __init__(
        self,
        *,
        group: int,
        slots: int,
        on_loss: Literal["redistribute", "shrink"],
        work: Work,
        reducer: GradientReducer,
        membership: Membership,
        cross: CrossGroup,
        heal_server: HealServer,
        token: bytes,
        timeouts: Timeouts,
        events: EventLog,
        beat: Callable[[str, int], None],
        all_in_group: Callable[[bool], bool],
        asked_to_leave: Callable[[], bool],
        device: torch.device,
    ) -> None:
        self._group, self._slots, self._on_loss = group, slots, on_loss
        self._work, self._reducer = work, reducer
        self._membership, self._cross, self._heal_server = membership, cross, heal_server
        self._token, self._timeouts, self._events = token, timeouts, events
        self._beat, self._all_in_group, self._device = beat, all_in_group, device
        self._asked_to_leave = asked_to_leave
        self.step = -1
        """The last step this group committed; -1 while it has no state."""
        self.checksum: int | None = None
        """Of the parameters after `step`, when an audit of them is due."""
        self.leaving = False
        """Whether this group stops after the next commit; settled anew in each attempt."""
        self._held = _Held(step=-1)
        self._failures = 0
        self._connected = ""
        self._slot_s: float | None = None
        self._doubted = -1
        self._progress = time.monotonic()

    def next(self) -> Commit:
        """Attempts until one commits.

        The caller then applies it: gradients by `GradientReducer.assign`, the optimizer, its counters, and last
        `committed()`.

        Raises:
            Blank: no group has a state; load one from elsewhere, call `restored`, then this again.
            OutOfData: on all groups, when one of them found no more.
            Left: asked to leave, and no quorum.
            GaveUp: see `Timeouts.give_up`.
        """
        attempt = 0
        while True:
            attempt += 1
            commit = self._attempt(attempt)
            if commit is not None:
                return commit
            waited = time.monotonic() - self._progress
            if waited > self._timeouts.give_up.total_seconds():
                raise GaveUp(f"no step could be committed for {waited:.0f} s; see this group's events for the reasons")

    def restored(self, step: int) -> None:
        """The caller loaded the state after `step` (0: a fresh start)."""
        self.step = step
        self._progress = time.monotonic()

    def committed(self) -> None:
        """The caller applied the commit that `next` returned."""
        self.step = self._held.step
        self.checksum = None
        self._failures = 0
        self._work.discard()
        self._progress = time.monotonic()

    def _attempt(self, attempt: int) -> Commit | None:
        begin = time.monotonic()
        self._beat("quorum", self.step + 1)
        # The request reaches a group's ranks at different moments.
        self.leaving = not self._all_in_group(not self._asked_to_leave())
        try:
            quorum = self._membership.join(
                step=self.step,
                failures=self._failures,
                metadata=self._heal_server.address,
                timeout=self._timeouts.quorum,
            )
        except QuorumUnavailable as error:
            self._failures += 1
            waited = round(time.monotonic() - begin, 3)
            self._events.emit("quorum_failed", self.step + 1, reason=str(error), waited_s=waited)
            if self.leaving:
                raise Left from error
            if self._membership.follow_lighthouse(self._all_in_group):
                self._events.emit("lighthouse_followed", self.step + 1)
            return None
        waited_s = time.monotonic() - begin
        if quorum.step < 0:
            raise Blank
        step = quorum.step + 1
        heal = _Heal(self._membership, quorum, self._token, self._timeouts.heal) if quorum.heals else None
        if self._held.step != step:
            self._held = _Held(step)
            self._work.discard()
        if quorum.serves and heal is None:
            self._heal_server.serve(quorum.step, self._work.serve())
        if heal is not None:
            heal.start()
        held_before = sorted(self._held.slots)
        computed: list[int] = []
        commit, reason = None, ""
        try:
            self._connect(quorum)
            if heal is not None and self._healed_first(heal, quorum):
                heal = None
            rows, plan = self._agree(quorum, heal, attempt, waited_s)
            commit, reason = self._sum_and_vote(quorum, rows, plan, heal, attempt, begin, computed)
        except (CrossGroupError, QuorumUnavailable) as error:
            reason = str(error)
            self._disconnect()
        if commit is None:
            self._failures += 1
        self._events.emit(
            "attempt",
            step,
            attempt=attempt,
            quorum_id=quorum.id,
            committed=commit is not None,
            reason=reason,
            computed=computed,
            held_before=held_before,
            recomputed=sorted(self._held.lost & set(computed)),
            took_s=round(time.monotonic() - begin, 4),
        )
        return commit

    def _connect(self, quorum: Quorum) -> None:
        """Build the process group anew if need be. Raises CrossGroupError on every rank of the group or on none."""
        key = self._membership.members_key(quorum)
        error: CrossGroupError | None = None
        if key != self._connected:
            self._connected = ""
            self._beat("connect", quorum.step + 1)
            try:
                self._cross.connect(
                    f"{quorum.store}/everstep/{quorum.key}/{self._membership.rank}",
                    rank=quorum.rank,
                    size=len(quorum.groups),
                    name=f"group-{self._group}",
                )
                self._connected = key
            except CrossGroupError as raised:
                error = raised
        if not self._all_in_group(error is None):
            raise error or CrossGroupError("another rank of this group could not connect to its peers")

    def _healed_first(self, heal: _Heal, quorum: Quorum) -> bool:
        """Whether all ranks of this group have their new state already, and took it over."""
        self._beat("heal", quorum.step + 1)
        heal.join(HEAL_FIRST_S)
        if not self._all_in_group(heal.state is not None):
            return False
        self._take_over(heal, quorum)
        return True

    def _take_over(self, heal: _Heal, quorum: Quorum) -> None:
        assert heal.state is not None
        self._work.heal(heal.state)
        self.step, self.checksum = quorum.step, None
        self._events.emit(
            "heal",
            quorum.step + 1,
            source_group=quorum.groups[quorum.source or 0],
            bytes=sum(t.numel() * t.element_size() for t in heal.state.tensors.values()),
            took_s=round(heal.took_s, 4),
        )

    def _agree(
        self, quorum: Quorum, heal: _Heal | None, attempt: int, waited_s: float
    ) -> tuple[list[ledger.Row], ledger.Plan]:
        """Exchange rows and plan. Raises CrossGroupError on every rank of the group or on none."""
        step = quorum.step + 1
        error: CrossGroupError | None = None
        matrix = torch.zeros(len(quorum.groups), ledger.words(self._slots), dtype=torch.int64)
        mine = ledger.Row(self._group, self.step, heal is None, self.checksum, frozenset(self._held.slots))
        matrix[quorum.rank] = torch.tensor(ledger.encode(mine, self._slots), dtype=torch.int64)
        rows: list[ledger.Row] = []
        try:
            matrix = self._cross.sum(matrix.to(self._device)).cpu()
            rows = [ledger.decode(row, self._slots) for row in matrix.tolist()]
        except CrossGroupError as raised:
            error = raised
        except ValueError as raised:
            error = CrossGroupError(f"the groups' rows are not whole: {raised}")
        if not self._all_in_group(error is None):
            raise error or CrossGroupError("another rank of this group could not reach its peers")
        plan = ledger.plan(rows, self._slots, self._on_loss)
        self._events.emit(
            "quorum",
            step,
            attempt=attempt,
            quorum_id=quorum.id,
            groups=list(quorum.groups),
            joiners=[row.group for row in rows if not row.computes],
            wait_s=round(waited_s, 4),
        )
        self._audit(rows, plan)
        if self._group in plan.drops:
            self._drop()
        return rows, plan

    def _audit(self, rows: Sequence[ledger.Row], plan: ledger.Plan) -> None:
        audited = [row for row in rows if row.checksum is not None]
        if self.checksum is None or not audited:
            return
        self._events.emit(
            "audit",
            self.step,
            checksum=f"{self.checksum:016x}",
            agreed=not plan.differing,
            differing=sorted(plan.differing),
        )

    def _sum_and_vote(
        self,
        quorum: Quorum,
        rows: Sequence[ledger.Row],
        plan: ledger.Plan,
        heal: _Heal | None,
        attempt: int,
        begin: float,
        computed: list[int],
    ) -> tuple[Commit | None, str]:
        """Compute the share, sum, vote. Fills `computed` with the slots done. Raises CrossGroupError."""
        step = quorum.step + 1
        if self._group in plan.differing:
            # Behind everybody from now on, so that the next quorum heals this group.
            self.step, self.checksum = -1, None
            self._drop()
            self._disconnect()
            return None, "this group's parameters differ from the other groups'; it heals"
        share = plan.shares.get(self._group, ())
        self._reducer.begin(self._cross, self._patience(share, plan))
        compute_begin = time.monotonic()
        exhausted = False
        for slot in share:
            self._beat("compute", step)
            if self._work.may_refuse:
                self._reducer.keep()
            self._reducer.begin_slot(last=slot == share[-1] and not self._work.may_refuse)
            try:
                self._work.compute(step, slot)
            except OutOfData:
                exhausted = True
                break
            except SlotRefused as refusal:
                self._events.emit("slot_refused", step, slot=slot, reason=str(refusal))
                self._reducer.take_back()
                continue
            self._reducer.end_slot()
            computed.append(slot)
            self._slot_s = (time.monotonic() - compute_begin) / len(computed)
        self._held.slots.update(computed)
        reduce_begin = time.monotonic()
        # The group's own collectives come in the same order on all its ranks, whatever fails between groups.
        sums = self._work.results()
        error = self._finish_gradients(step) or self._doubt(step, computed)
        while heal is not None and heal.is_alive():
            self._beat("heal", step)
            heal.join(timeout=1.0)
        total, coverage = torch.zeros(0), []
        newest_held = self._work.settle()
        if not error:
            try:
                total = self._sum_ledger(sums, exhausted, newest_held, any(not row.computes for row in rows))
                coverage = [round(count) for count in total[: self._slots].tolist()]
                self._exchange_notes(quorum)
            except CrossGroupError as raised:
                error = str(raised)
        if not error and total[4 * self._slots + 1] > 0:
            raise OutOfData
        reduce_s = time.monotonic() - reduce_begin
        reason = error or ledger.verdict(coverage, self._on_loss) or (heal.error if heal else "")
        self._beat("vote", step)
        if not self._membership.vote(step=step, yes=not reason, timeout=self._timeouts.reduce):
            if error:
                self._disconnect()
            return None, reason or "another rank of this group voted no"
        # The state must stay as it is until every joiner has read it.
        self._heal_server.close_gate(HEAL_GATE_TIMEOUT)
        if heal is not None:
            self._take_over(heal, quorum)
        _, owners, tokens, loss, rest = total.split([self._slots] * 4 + [len(total) - 4 * self._slots])
        return (
            Commit(
                step=step,
                tokens=tokens,
                loss=loss,
                extra=rest[5:],
                owners=tuple(round(o) - 1 if c else -1 for o, c in zip(owners.tolist(), coverage, strict=True)),
                groups=quorum.groups,
                lineage=f"{round(float(rest[2])):x}",
                held=ledger.common_value(float(rest[3]), float(rest[4]), len(rows)),
                quorum_id=quorum.id,
                once=all(count == 1 for count in coverage),
                saver=min(plan.shares),
                all_leave=round(float(rest[0])) == len(rows),
                attempts=attempt,
                compute_s=reduce_begin - compute_begin,
                reduce_s=reduce_s,
                took_s=time.monotonic() - begin,
            ),
            "",
        )

    def _patience(self, share: Sequence[int], plan: ledger.Plan) -> timedelta:
        """For the gradients' sums: groups with a smaller share than others are there earlier."""
        ahead = max(map(len, plan.shares.values()), default=0) - len(share)
        if ahead == 0:
            return self._timeouts.reduce
        if not share or self._slot_s is None:
            return max(self._timeouts.compute, self._timeouts.reduce)
        return self._timeouts.reduce + 2 * ahead * timedelta(seconds=self._slot_s)

    def _finish_gradients(self, step: int) -> str:
        """Wait for the gradients' sums; why they failed, or nothing."""
        self._beat("reduce", step)
        try:
            self._reducer.finish()
        except CrossGroupError as error:
            return str(error)
        return ""

    def _doubt(self, step: int, computed: list[int]) -> str:
        """Why the sums cannot be right; or nothing. A group whose own part is not finite gives its slots up, to compute
        them again: something may have gone wrong. When that changes nothing the step goes on, and training diverges."""
        if self._all_in_group(self._reducer.finite()) or self._doubted == step:
            return ""
        self._doubted = step
        if not self._all_in_group(self._reducer.own_finite()):
            for slot in sorted(self._held.slots):
                self._events.emit("slot_refused", step, slot=slot, reason="a gradient is not finite")
            computed.clear()
            self._held.slots.clear()
            self._work.discard()
        return "the sum of the gradients is not finite"

    def _disconnect(self) -> None:
        self._cross.abort()
        self._connected = ""

    def _sum_ledger(self, sums: SlotSums, exhausted: bool, newest_held: int, somebody_heals: bool) -> torch.Tensor:
        """Over the groups: for each slot the times it is in the sum, its owner's id + 1, its tokens, its loss (4 S
        numbers), then the number of groups that leave and that ran out of data, their lives, the newest step in their
        snapshots and its square, then `SlotSums.extra`. float64."""
        held = torch.zeros(self._slots, dtype=torch.float64)
        held[sorted(self._held.slots)] = 1
        life = ledger.life(self._group, incarnation())
        flags = [self.leaving, exhausted, life, newest_held, newest_held**2]
        flags = torch.tensor([float(flag) for flag in flags], dtype=torch.float64)
        vector = torch.cat([held, held * (self._group + 1), sums.tokens, sums.loss, flags, sums.extra])
        # A joiner comes here only when it has its state.
        timeout = self._timeouts.heal if somebody_heals else self._timeouts.reduce
        return self._cross.sum(vector.to(self._device), timeout).cpu()

    def _exchange_notes(self, quorum: Quorum) -> None:
        notes = self._work.notes(quorum.step + 1)
        if notes is not None:
            self._work.noted(self._cross.gather_bytes(notes, rank=quorum.rank, device=self._device))

    def _drop(self) -> None:
        self._held.lost |= self._held.slots
        self._held.slots.clear()
        self._work.discard()
