"""The step protocol: one rank's way from a committed step to the next, whatever happens to the other groups.

An attempt (`StepProtocol.attempt`) is a fixed sequence of decisions of the whole group (`everstep.step.decisions`):

1. begin: all ranks are at the same step of the same history; who is asked to leave; what was being healed is here.
2. quorum: rank 0 asks the lighthouse, the others learn from it who the members are. From that alone follows who has
   the state that counts, and who takes it over from whom (`everstep.step.quorum`).
3. connect: a process group between the members, built anew if they changed or the last one broke.
4. rows: who holds what, in which quorum, at which step of which history. Then the plan (`ledger.plan`). Where a check
   refused a slot: what every group saw in it.
5. compute the own share; gradients accumulate in `param.grad`, losses as sums; then the sums of the gradients.
6. tally: how often each slot is in the sum, tokens, losses. All ranks that saw the same tally, with every slot in it
   exactly once, commit; if not, the next attempt keeps what is held: a retry. Where the process of a member was seen to
   end, who is done with its share does not wait idly for a quorum with those who are not: it goes ahead with its part
   of the lost slots (`ledger.plan_without`).

Whoever has no state yet never makes others wait: it takes part in the sums with zeros and keeps the summed gradients
of each step, until the state is there that the first of them belongs to; then it applies them one after the other. A
state that is given up for another's stays a fallback until that is here.

Nothing here knows torchtitan or torchft; see `everstep.step.interfaces`.
"""

import json
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NoReturn, TypeVar

from everstep.step import ledger
from everstep.step.attempt import Attempt, Beginning, Healing, Held, Turn
from everstep.step.decisions import Decisions
from everstep.step.interfaces import (
    Clock,
    Commit,
    Events,
    GroupBroken,
    HealDoor,
    Membership,
    OutOfData,
    QuorumUnavailable,
    Ranks,
    Reducer,
    RunFiles,
    SlotRefused,
    Sums,
    SumsBroken,
    Timeouts,
    Work,
)
from everstep.step.quorum import NO_STATE, Quorum, Request, decode, encode, read_quorum

T = TypeVar("T")

ASK_AGAIN_S = 0.2
"""A quorum that cannot be used is not asked for again sooner."""

AHEAD = 0.5
"""Of the time for which a quorum waits for a group: how much of it that computes before it asks."""
UNKNOWN_MS = 1 << 62
"""What a slot takes where none was computed: longer than any wait, so that nobody goes ahead."""


class GaveUp(RuntimeError):
    """No step could be committed for `Timeouts.give_up`."""


class AttemptFailed(Exception):
    """All ranks of the group know that this attempt commits nothing; says why, as far as this rank does."""


class StepProtocol:
    """Runs attempts at steps for one rank of a group.

    Args:
        group: this group's id.
        life: differs after every start of the group; the same on all its ranks.
        slots: S.
        on_loss, homes: see `ledger.plan`.
        adopt_after_s: how long the slots of a lost group wait for it, where they have homes.
        work, reducer: the trainer's side.
        ranks: the group's own collectives.
        membership: rank 0's voice at the lighthouse; None on the other ranks.
        sums: collectives over the rank column.
        door: where joiners heal from.
        store: `host:port` of a TCPStore of this group that other groups reach.
        timeouts: the protocol's waits.
        clock, files, events: of this rank.
    """

    def __init__(
        self,
        *,
        group: int,
        life: str,
        slots: int,
        on_loss: ledger.OnLoss,
        work: Work,
        reducer: Reducer,
        ranks: Ranks,
        membership: Membership | None,
        sums: Sums,
        door: HealDoor,
        store: str,
        timeouts: Timeouts,
        clock: Clock,
        files: RunFiles,
        events: Events,
        homes: int = 0,
        adopt_after_s: float = 0.0,
    ) -> None:
        self._group, self._life, self._slots, self._on_loss = group, life, slots, on_loss
        self._homes, self._adopt_after_s = homes, adopt_after_s
        self._lost_since: float | None = None
        """Since when some group that slots are at home in has not computed."""
        self._adopts = True
        self._work, self._reducer, self._sums, self._door = work, reducer, sums, door
        self.decisions = Decisions(ranks)
        self._ranks, self._membership, self._store = ranks, membership, store
        self._timeouts, self._clock, self._files, self._events = timeouts, clock, files, events
        self._doors = self._gather_doors()
        self.step = NO_STATE
        """The last step whose state this group has."""
        self.history = 0
        """Of that state; see `ledger.extend`."""
        self.leaving = False
        """Whether this group stops after the next commit; settled anew in each attempt."""
        self.finishing = False
        """Whether this group makes no more steps, and says so when it meets the others."""
        self._suspect = self._proven = False
        self._finished_before = files.finished_step()
        self._missed_the_end = False
        """Whether the others ended the run while this group asked for its last quorum."""
        self._checksum: int | None = None
        self._held = Held(NO_STATE, 0)
        self._unsummed: Attempt | None = None
        """The last attempt, where the sums of the gradients failed."""
        self._healing: Healing | None = None
        self._connected = ""
        self._column: tuple[int, ...] = ()
        self._asked = 0
        self._tries = 0
        self._slot_s: float | None = None
        self._doubted = NO_STATE
        self._progress = clock.now()

    # The state

    def restored(self, step: int, history: int) -> None:
        """The caller loaded the state after `step` (0: a fresh start)."""
        self._stop_healing()
        self._have(step, history)
        self._checksum = self._work.checksum()

    def apply(self, commit: Commit) -> None:
        """The optimizer step of a commit, on all ranks of the group."""
        self._door.close()
        self._work.apply(commit)
        self._have(commit.step, commit.history)
        self._checksum = self._work.checksum()

    def _have(self, step: int, history: int) -> None:
        self.step, self.history = step, history
        self._suspect = False
        self._checksum = None
        self._let_go(step + 1, history)
        self._tries = 0
        self._progress = self._clock.now()

    def _let_go(self, step: int, history: int) -> None:
        self._held = Held(step, history)
        self._work.discard()

    def _take_over(self, healing: Healing) -> None:
        """Take the healed state and apply what was committed since."""
        self._door.close()
        self._healing = None
        self._work.heal(healing.fetch.state())
        self._proven = False
        self._have(healing.step, healing.history)
        self._suspect = healing.suspect
        self._events.emit(
            "heal",
            healing.step + 1,
            source_group=healing.source,
            history=f"{healing.history:x}",
            bytes=healing.fetch.nbytes,
            took_s=round(healing.fetch.took_s, 4),
            caught_up=len(healing.commits),
        )
        for commit, sums in healing.commits:
            self._reducer.unstash(sums)
            self.apply(commit)

    def _stop_healing(self) -> None:
        if self._healing is not None:
            self._healing.fetch.cancel()
            self._healing = None

    # An attempt

    def attempt(self) -> Commit | Turn:
        """One attempt at the next step. The caller applies a commit (`apply`) before the next one.

        Raises:
            GroupBroken: this group has to start again.
            GaveUp: see `Timeouts.give_up`.
        """
        self._tries += 1
        if turn := self._begin():
            return turn
        begun = self._clock.now()
        self._compute_ahead()
        asked = self._clock.now()
        quorum = self.meet()
        if self._missed_the_end:
            return Turn.TOO_LATE
        if quorum is None:
            return Turn.LEFT if self.leaving else Turn.RETRY
        if quorum.step == NO_STATE:
            return Turn.BLANK
        if quorum.is_finishing():
            return Turn.OVER if self._group in quorum.able else Turn.RETRY
        attempt = Attempt(self._tries, begun, quorum, self._clock.now() - asked, compute_s=asked - begun)
        self._take_sides(quorum)
        held = self._held
        held_before = sorted(held.slots.difference(held.computed))
        outcome, reason = self._carry_out(attempt)
        self._events.emit(
            "attempt",
            attempt.step,
            attempt=attempt.number,
            quorum_id=quorum.id,
            committed=isinstance(outcome, Commit) or outcome is Turn.FOLLOWED,
            reason=reason,
            computed=list(held.computed),
            held_before=held_before,
            recomputed=sorted(held.recomputed),
            took_s=round(self._clock.now() - begun, 4),
        )
        held.computed.clear()
        held.recomputed.clear()
        return outcome

    def _carry_out(self, attempt: Attempt) -> tuple[Commit | Turn, str]:
        """What the attempt came to, and why if it failed."""
        try:
            self._connect(attempt.quorum)
            self._exchange_rows(attempt)
            self._hear_witnesses(attempt)
            self._compute(attempt)
            if attempt.plan.awaited:
                self._await_lost(attempt)
            self._unsummed = attempt
            tally = self._sum(attempt)
        except AttemptFailed as failed:
            return Turn.RETRY, str(failed)
        if tally.exhausted:
            has_state = self._group in attempt.plan.shares
            return Turn.OUT_OF_DATA if has_state else Turn.TOO_LATE, "the data ended"
        return self._commit(attempt, tally), ""

    def _begin(self) -> Turn | None:
        """Settle what all ranks begin with; what the attempt came to where it ends here.

        Raises:
            GroupBroken: the ranks have different states.
            GaveUp: no commit for too long.
        """
        self._files.beat("quorum", self.step + 1)
        healing, speaks = self._healing, self.decisions.rank == 0
        waited_s = self._clock.now() - self._progress
        mine = Beginning(
            step=self.step,
            history=self.history,
            fenced=speaks and self._files.fenced(),
            too_late=speaks and self._is_too_late(),
            asked_to_leave=self._files.asked_to_leave(),
            gives_up=waited_s > self._timeouts.give_up.total_seconds(),
            lost_peers=self._connected != "" and not self._sums.connected,
            state_is_here=healing is not None and healing.fetch.state() is not None,
            heal_failed=healing is not None and healing.fetch.error != "",
            adopts=self._waited_for_lost(),
        )
        ranks = [Beginning(*said) for said in self.decisions.gather("begin", [int(word) for word in mine])]
        if len({(rank.step, rank.history) for rank in ranks}) > 1:
            raise GroupBroken(f"the ranks of this group are at different steps or histories: {ranks}")
        if any(rank.fenced for rank in ranks):
            return Turn.FENCED
        if any(rank.too_late for rank in ranks):
            return Turn.TOO_LATE
        if any(rank.gives_up for rank in ranks):
            raise GaveUp(f"no step could be committed for {waited_s:.0f} s; see this group's events for the reasons")
        self.leaving = any(rank.asked_to_leave for rank in ranks)
        self._adopts = all(rank.adopts for rank in ranks)
        if any(rank.lost_peers for rank in ranks):
            self._disconnect()
        if healing is not None and all(rank.state_is_here for rank in ranks):
            self._take_over(healing)
            return Turn.CAUGHT_UP
        if healing is not None and any(rank.heal_failed for rank in ranks):
            self._events.emit("heal_failed", healing.step + 1, source_group=healing.source, reason=healing.fetch.error)
            self._stop_healing()
        return None

    def _waited_for_lost(self) -> bool:
        """Whether lost groups have been waited for long enough."""
        waited_s = 0.0 if self._lost_since is None else self._clock.now() - self._lost_since
        return waited_s >= self._adopt_after_s

    def _is_too_late(self) -> bool:
        """Whether the others ended the run, while this group was busy, with a later state than it has. A group that
        left alone has ended nothing for those that were not asked to."""
        finished = self._files.finished_step()
        if finished == self._finished_before or not NO_STATE < self.step < finished:
            return False
        return self._files.asked_to_leave() or self._files.ended_for_all()

    def meet(self, *, brief: bool = False) -> Quorum | None:
        """The next quorum, the same on all ranks of the group; None when there is none now.

        Args:
            brief: whether to wait no longer than for a group that lives and does not ask.
        """
        self._asked += 1
        begun = self._clock.now()
        answer = {"moved": False, "reason": "", "id": 0, "members": [], "too_late": False}
        if self._membership is not None:
            # Since rank 0 looked at the beginning, another rank may have stood still for longer than the run went on.
            answer = self._ask(self._membership, brief) | {"too_late": self._is_too_late()}
        answer = json.loads(self.decisions.first("quorum", json.dumps(answer).encode()))
        self._missed_the_end = answer["too_late"]
        if answer["moved"]:
            self._events.emit("lighthouse_followed", self.step + 1)
        if answer["reason"]:
            waited_s = round(self._clock.now() - begun, 3)
            self._events.emit("quorum_failed", self.step + 1, reason=answer["reason"], waited_s=waited_s)
            return None
        return read_quorum(answer["id"], [decode(member) for member in answer["members"]])

    def _ask(self, membership: Membership, brief: bool) -> dict[str, Any]:
        """Rank 0's question and its answer, as JSON."""
        follows, followed = self._healing.follows if self._healing is not None else (NO_STATE, 0)
        request = Request(
            group=self._group,
            life=self._life,
            number=self._asked,
            step=self.step,
            history=self.history,
            suspect=self._suspect,
            follows=follows,
            followed=followed,
            finishing=self.finishing,
            connected=self._connected,
            store=self._store,
            doors=self._doors,
        )
        moved, begun = membership.follow(), self._clock.now()
        try:
            patience = min(self._timeouts.quorum, self._timeouts.join) if brief else self._timeouts.quorum
            quorum_id, members = membership.ask(request, patience)
            read_quorum(quorum_id, members)
            if request not in members:
                raise QuorumUnavailable("the quorum is for another request of this group")
        except (QuorumUnavailable, ValueError) as error:
            self._clock.sleep(max(0.0, begun + ASK_AGAIN_S - self._clock.now()))
            return {"moved": moved, "reason": str(error), "id": 0, "members": []}
        return {"moved": moved, "reason": "", "id": quorum_id, "members": [encode(member) for member in members]}

    def _take_sides(self, quorum: Quorum) -> None:
        """Compute on, or begin to heal; and open the state to those who heal from here."""
        if self._group in quorum.able:
            self._stop_healing()
            if (self._held.step, self._held.history) != (quorum.step + 1, quorum.history):
                self._let_go(quorum.step + 1, quorum.history)
        else:
            self._drop()
        if self._group in quorum.sources:
            self._stop_healing()
            self._files.beat("heal", quorum.step + 1)
            source = quorum.sources[self._group]
            if self.step > NO_STATE and not self._suspect:
                self._events.emit(
                    "history_left",
                    self.step,
                    history=f"{self.history:x}",
                    for_step=quorum.step,
                    for_history=f"{quorum.history:x}",
                )
            giver = quorum.member(source)
            fetch = self._door.fetch(giver.doors[self.decisions.rank], quorum.step, quorum.history)
            self._healing = Healing(source, giver.suspect, quorum.step, quorum.history, fetch)
        if self._group in quorum.sources.values():
            self._door.serve(quorum.step, quorum.history, self._work.serve())

    def _with_peers(self, point: str, meet: Callable[[], T]) -> T:
        """What `meet` returned, on ranks of this group that all met their peers of the other groups."""
        met: list[T] = []
        reason = "another rank of this group could not reach its peers"
        try:
            met.append(meet())
        except SumsBroken as broken:
            reason = str(broken)
        if not self.decisions.all_true(point, bool(met)):
            self._disconnect()
            raise AttemptFailed(reason)
        return met[0]

    def _connect(self, quorum: Quorum) -> None:
        """Build the process group anew if need be."""
        if self._connected and quorum.connected_in() == self._connected and quorum.groups == self._column:
            return
        self._disconnect()
        self._files.beat("connect", quorum.step + 1)
        place = {"rank": quorum.rank(self._group), "size": len(quorum.members)}
        self._with_peers("connect", lambda: self._sums.connect(key=quorum.key, store=quorum.store(), **place))
        self._connected, self._column = quorum.key, quorum.groups

    def _exchange_rows(self, attempt: Attempt) -> None:
        """Learn what the groups hold and plan."""
        quorum = attempt.quorum
        computes = self._group in quorum.able
        mine = ledger.Row(
            group=self._group,
            quorum=ledger.quorum_word(quorum.key),
            step=self.step,
            history=self.history,
            computes=computes,
            checksum=self._checksum if computes else None,
            proven=self._proven,
            held=frozenset(self._held.slots),
            adopts=self._adopts,
            refused=frozenset(self._held.refused),
            disputed=frozenset(s for s, times in self._held.refused.items() if times >= ledger.WITNESS_AFTER),
        )
        rows = self._with_peers("rows", lambda: self._gather_rows(mine, quorum))
        attempt.rows, attempt.plan = rows, ledger.plan(rows, self._slots, self._on_loss, self._homes)
        if set(range(self._homes)) <= {row.group for row in rows if row.computes}:
            self._lost_since = None
        elif self._lost_since is None:
            self._lost_since = self._clock.now()
        self._events.emit(
            "quorum",
            attempt.step,
            attempt=attempt.number,
            quorum_id=quorum.id,
            groups=list(quorum.groups),
            joiners=[row.group for row in rows if not row.computes],
            history=f"{quorum.history:x}",
            wait_s=round(attempt.waited_s, 4),
        )
        self._heed_audit(attempt)
        if self._group in attempt.plan.drops:
            self._drop()

    def _gather_rows(self, mine: ledger.Row, quorum: Quorum) -> list[ledger.Row]:
        rows = [ledger.Row.decode(row, self._slots) for row in self._sums.gather(mine.encode(self._slots))]
        if objection := ledger.objection(rows, quorum):
            raise SumsBroken(objection)
        return rows

    def _hear_witnesses(self, attempt: Attempt) -> None:
        """Where a slot was refused, learn what every group saw in it."""
        doubts = attempt.plan.doubts
        if not doubts:
            return
        seen = [doubt.slot for doubt in doubts] if self._group in attempt.plan.shares else []
        said = self._with_peers("witnesses", lambda: self._sums.gather_bytes(self._work.testify(seen)))
        self._work.weigh(attempt.step, doubts, dict(zip(attempt.quorum.groups, said, strict=True)))

    def _heed_audit(self, attempt: Attempt) -> None:
        """Draw this group's conclusions from the checksums in the rows."""
        differing = attempt.plan.differing
        if self._checksum is not None and self._group in attempt.quorum.able:
            self._events.emit(
                "audit",
                self.step,
                checksum=f"{self._checksum:016x}",
                agreed=not differing,
                differing=sorted(differing),
            )
            self._proven = self._group not in differing
        if self._group in differing:
            # The state stays a fallback for the case that all others die; the next quorum heals this group.
            self._suspect = True
            self._drop()
        if self._healing is not None and self._healing.source in differing:
            self._stop_healing()

    def _compute(self, attempt: Attempt) -> None:
        """Compute the share; what comes of it is held."""
        share, begun = attempt.plan.shares.get(self._group, ()), self._clock.now()
        self._reducer.begin(self._sums, self._patience(share, attempt.plan), attempt.step)
        attempt.exhausted = self._compute_slots(attempt.step, share, summed=not attempt.plan.awaited)
        attempt.compute_s += self._clock.now() - begun

    def _compute_slots(self, step: int, share: Sequence[int], *, summed: bool) -> bool:
        """Compute slots, which are held then; whether the data ended.

        Args:
            summed: whether the sums begin with the last of them.
        """
        computed: list[int] = []
        exhausted, begun = False, self._clock.now()
        for slot in share:
            self._files.beat("compute", step)
            apart = self._work.may_refuse(step, slot)
            self._reducer.begin_slot(last=slot == share[-1] and summed, apart=apart)
            try:
                self._work.compute(step, slot)
            except OutOfData:
                exhausted = True
                break
            except SlotRefused as refusal:
                self._events.emit("slot_refused", step, slot=slot, reason=str(refusal))
                self._held.refused[slot] += 1
                continue
            self._reducer.end_slot()
            computed.append(slot)
            self._slot_s = (self._clock.now() - begun) / len(computed)
        self._reducer.end_slots()
        self._held.slots.update(computed)
        self._held.computed += computed
        self._held.recomputed |= self._held.lost.intersection(computed)
        return exhausted

    def _compute_ahead(self) -> None:
        """After a sum that failed as groups ended, compute this group's part of what they leave."""
        failed, self._unsummed = self._unsummed, None
        if failed is None or (self._held.step, self._held.history) != (failed.step, failed.quorum.history):
            return
        members = failed.quorum.groups
        slot_ms = UNKNOWN_MS if self._slot_s is None else 1 + int(1000 * self._slot_s)
        said = self.decisions.gather("ended", [slot_ms, *ledger.pack(self._sums.ended(), len(members))])
        places = frozenset().union(*(ledger.unpack(words, len(members)) for _, *words in said))
        ended = frozenset(members[place] for place in places) - {self._group}
        if not ended or not self._held.slots >= set(failed.plan.shares.get(self._group, ())):
            return
        shares = ledger.plan_without(ended, failed.rows, failed.plan, self._on_loss, self._homes)
        # The others may ask for a quorum at once: those that it makes without this group compute all that it has again.
        in_time = int(AHEAD * 1000 * self._timeouts.join.total_seconds() / max(ms for ms, *_ in said))
        share = shares.get(self._group, ())[:in_time]
        self._reducer.begin(self._sums, self._timeouts.reduce, failed.step)
        self._compute_slots(failed.step, share, summed=False)
        self._files.beat("quorum", failed.step)

    def _await_lost(self, attempt: Attempt) -> NoReturn:
        """Meet the others, who have computed their shares as well, to ask for a quorum with the lost groups again."""
        self._with_peers("awaited", lambda: self._sums.gather([self._group]))
        if not any(attempt.plan.shares.values()):
            self._clock.sleep(ASK_AGAIN_S)
        raise AttemptFailed(f"slots {sorted(attempt.plan.awaited)} wait for their groups")

    def _patience(self, share: Sequence[int], plan: ledger.Plan) -> timedelta:
        """For the gradients' sums: groups with a smaller share than others are there earlier. Never so long that this
        group's own watchdog would take it for stalled: it asks again then, and holds what it has."""
        ahead = max(map(len, plan.shares.values()), default=0) - len(share)
        longest = max(self._timeouts.compute, self._timeouts.reduce)
        if ahead == 0:
            return self._timeouts.reduce
        if not share or self._slot_s is None:
            return longest
        return min(self._timeouts.reduce + 2 * ahead * timedelta(seconds=self._slot_s), longest)

    def _sum(self, attempt: Attempt) -> ledger.Tally:
        """Sum gradients and tally over the groups; the tally of the step."""
        begun, step = self._clock.now(), attempt.step
        results = self._work.results()
        snapshot = self._work.settle()
        mine = ledger.Tally.of(
            self._group,
            frozenset(self._held.slots),
            self._slots,
            results,
            leaving=self.leaving,
            exhausted=attempt.exhausted,
            snapshot=snapshot,
        )
        self._files.beat("reduce", step)
        error = ""
        try:
            self._reducer.finish()
        except SumsBroken as broken:
            error = str(broken)
        self._judge_sums(step, error, results.slots)
        # Nobody is busy any more, and others may have a tally that fails here.
        self._unsummed = None
        tally = mine
        try:
            total = self._sums.total(mine.encode(), self._timeouts.reduce)
            tally = ledger.Tally.decode(total, self._slots)
            notes = self._work.notes(step)
            if notes is not None:
                self._work.noted(self._sums.gather_bytes(notes))
            # Where a slot is missing because the data ended, that is what there is to say.
            error = "" if tally.exhausted else ledger.verdict(tally.coverage, self._on_loss)
        except SumsBroken as broken:
            error = str(broken)
            self._sums.abort()
        attempt.reduce_s = self._clock.now() - begun
        self._files.beat("vote", step)
        votes = self.decisions.gather("vote", [int(not error), tally.digest()])
        if not all(yes for yes, _ in votes) or len({digest for _, digest in votes}) > 1:
            self._disconnect()
            raise AttemptFailed(error or "another rank of this group did not see the same sum")
        return tally

    def _judge_sums(self, step: int, error: str, computed: frozenset[int]) -> None:
        """Fail the attempt if the sums of the gradients cannot be used; drop what is held where this group is to blame.

        A group whose own part is not finite gives its slots up once, to compute them again: something may have gone
        wrong. When that changes nothing the step goes on, and training diverges.

        Raises:
            GroupBroken: what a rank holds is not what the ledger says.
        """
        sound = error != "" or self._doubted == step or self._reducer.finite() or self._reducer.own_finite()
        whole = computed == frozenset(self._held.slots)
        said = self.decisions.gather("sums", [int(not error), int(sound), int(whole)])
        summed, sound, whole = (all(flags) for flags in zip(*said, strict=True))
        if not whole:
            raise GroupBroken(f"the ledger says slots {sorted(self._held.slots)} and the trainer {sorted(computed)}")
        if summed and sound:
            return
        # The sums of other columns, and the tally of other groups, may still go on.
        self._disconnect()
        if not summed:
            raise AttemptFailed(error or "another rank of this group did not get its sum")
        self._doubted = step
        for slot in sorted(self._held.slots):
            self._events.emit("slot_refused", step, slot=slot, reason="a gradient is not finite")
        self._drop()
        raise AttemptFailed("a gradient of this group is not finite")

    def _commit(self, attempt: Attempt, tally: ledger.Tally) -> Commit | Turn:
        """The commit; who has no state to apply it to keeps it for later."""
        quorum = attempt.quorum
        commit = Commit(
            step=attempt.step,
            history=ledger.extend(quorum.history, attempt.step, quorum.key),
            parent=quorum.history,
            tokens=tally.sums.tokens,
            loss=tally.sums.loss,
            extra=tally.sums.extra,
            owners=tuple(tally.owner(slot) for slot in range(self._slots)),
            groups=quorum.groups,
            able=tuple(sorted(attempt.plan.shares)),
            held=tally.common_snapshot(len(quorum.members)),
            once=all(count == 1 for count in tally.coverage),
            saver=min(attempt.plan.shares),
            all_leave=tally.leaving == len(quorum.members),
            quorum_id=quorum.id,
            attempts=attempt.number,
            compute_s=attempt.compute_s,
            reduce_s=attempt.reduce_s,
            took_s=self._clock.now() - attempt.begun,
        )
        if self._group in attempt.plan.shares:
            return commit
        if self._healing is not None:
            self._healing.commits.append((commit, self._reducer.stash()))
        self._let_go(NO_STATE, 0)
        self._tries = 0
        self._progress = self._clock.now()
        return Turn.FOLLOWED

    def _disconnect(self) -> None:
        self._sums.abort()
        self._connected = ""

    def _drop(self) -> None:
        self._held.lost |= self._held.slots
        self._held.slots.clear()
        self._work.discard()

    def _gather_doors(self) -> tuple[str, ...]:
        """Where each rank of this group serves its state, by rank."""
        mine = self._door.address.encode()
        longest = max(length for [length] in self.decisions.gather("door", [len(mine)]))
        padded = mine.ljust(longest)
        said = self.decisions.gather("doors", list(padded))
        return tuple(bytes(letters).decode().strip() for letters in said)
