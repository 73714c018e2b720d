"""The step protocol: one rank's way from a committed step to the next, whatever happens to the other groups.

An attempt (`StepProtocol.attempt`) is a fixed sequence of decisions of the whole group (`everstep.step.decisions`):

1. begin: all ranks are at the same step of the same history; who is asked to leave; whether the healed state is here.
2. quorum: that of the last attempt, if it committed and nobody wants another one. Else rank 0 asks the lighthouse, the
   others learn from it who the members are. From that alone follows who has the state that counts, and who takes it
   over from whom (`everstep.quorum.request`).
3. connect: a process group between the members, built anew if they changed or the last one broke.
4. rows: who holds and refused what, in which quorum, at which step of which history. Then the plan (`ledger.plan`).
5. compute the own share; gradients accumulate in `param.grad`, losses as sums; then the sums of the gradients
   (`everstep.step.holding`).
6. tally: how often each slot is in the sum, tokens, losses, who wants a quorum. All ranks that saw the same tally, with
   every slot in it exactly once and none refused, commit; if not, the next attempt keeps what is held: a retry.

A group that has no state yet never makes others wait: it takes part in the sums with zeros and keeps the summed
gradients of each step, until the state is there that the first of them belongs to; then it applies them one after the
other. A group keeps its old state until the new one is here.

Nothing here knows torchtitan or torchft; see `everstep.step.interfaces`.
"""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TypeVar

from everstep.quorum.errors import GroupBroken, SumsBroken
from everstep.quorum.process_group import Place
from everstep.quorum.request import NOTHING, Quorum, State
from everstep.run.typed import UnfitError
from everstep.step import ledger
from everstep.step.asking import Asker
from everstep.step.attempt import Attempt, Beginning, Group, Healing, Host, Rules, Turn
from everstep.step.decisions import Decisions
from everstep.step.holding import OTHER_BITS, Holding
from everstep.step.interfaces import Commit, Work
from everstep.step.pace import Pace
from everstep.step.reduction import GradientReducer

USUAL = 3
"""How many times as long as usual sums may take after the last gradient before a group is late."""

T = TypeVar("T")


class GaveUp(RuntimeError):
    """No step could be committed for `Timeouts.give_up`."""


class AttemptFailed(Exception):
    """All ranks of the group know that this attempt commits nothing; says why, as far as this rank does."""


class StepProtocol:
    """Runs attempts at steps for one rank of a group.

    Args:
        group: this rank's.
        rules: of the run.
        work, reducer: the trainer's side.
        host: of this rank.
    """

    def __init__(self, *, group: Group, rules: Rules, work: Work, reducer: GradientReducer, host: Host) -> None:
        self.group, self._rules, self._work, self._reducer = group.id, rules, work, reducer
        self._sums, self._door, self._membership = group.sums, group.door, group.membership
        self._clock, self._files, self._events = host.clock, host.files, host.events
        self.decisions = Decisions(group.ranks)
        self._asker = Asker(group, self.decisions, host, rules)
        self._holding = Holding(work, reducer, self.decisions, host, group.id)
        self.state = NOTHING
        self.leaving = False
        """Whether this group stops after the next commit; settled anew in each attempt."""
        self._checksum: int | None = None
        """Of the state, while an audit of it is due."""
        self._proven = False
        """Whether an audit has agreed with the state since it was last taken over."""
        self._healing: Healing | None = None
        self._connected: Quorum | None = None
        """The quorum of the process group that this rank is in."""
        self._next: Quorum | None = None
        """The quorum of the next attempt, for which nobody is asked: that of the last one, moved on by its commit."""
        self._most = rules.dealing.groups
        """Groups of the run: the number at its start, or the most members since, less those that have left."""
        self._tries = 0
        self._slot_us = 0
        """What a slot takes the slowest rank of this group (`ledger.Row.slot_us`)."""
        self._is_slow = False
        self._waits = Pace()
        """How long sums take beyond compute."""
        self._progress = host.clock.now()

    # The state

    def restored(self, step: int, history: int) -> None:
        """The caller loaded the state after `step` (0: a fresh start)."""
        self._give_up_healing()
        self._have(State(step, history), self._work.checksum())

    def apply(self, commit: Commit) -> None:
        """The optimizer step of a commit, on all ranks of the group."""
        self._door.close()
        self._work.apply(commit)
        self._have(State(commit.step, commit.history), self._work.checksum())

    def _have(self, state: State, checksum: int | None) -> None:
        self.state, self._checksum = state, checksum
        self._holding.start()
        self._tries, self._progress = 0, self._clock.now()

    def _take_over(self, healing: Healing) -> None:
        """Take the healed state and apply what was committed since."""
        self._door.close()
        self._healing = None
        self._work.heal(healing.fetch.state)
        self._have(healing.state, None)
        self._proven = False
        self._events.emit(
            "heal",
            healing.state.step + 1,
            source_groups=healing.sources,
            history=f"{healing.state.history:x}",
            bytes=healing.fetch.nbytes,
            took_s=round(healing.fetch.took_s, 4),
            caught_up=len(healing.commits),
        )
        for commit, sums in healing.commits:
            self._reducer.unstash(sums)
            self.apply(commit)

    # An attempt

    def attempt(self) -> Commit | Turn | Quorum:
        """One attempt at the next step. The caller applies a commit (`apply`) before the next one. A quorum is one in
        which nobody has a state: it has to come from somewhere else, and its members restore one, each for itself.

        Raises:
            GroupBroken: this group has to start again.
            GaveUp: see `Timeouts.give_up`.
        """
        self._tries += 1
        if turn := self._begin():
            return turn
        begun = self._clock.now()
        met = self._next or self.meet()
        self._next = None
        if isinstance(met, Turn):
            return met
        if met is None:
            return Turn.LEFT if self.leaving else Turn.RETRY
        if met.is_finishing():
            return Turn.OVER if self.group in met.able else Turn.RETRY
        if self.group in met.left_out:
            self._disconnect()
            self._progress = self._clock.now()  # the others go on, and have named this group
            return Turn.LEFT if self.leaving else Turn.RETRY
        if met.state == NOTHING:
            return met
        computes = self.state == met.state
        self._most = max(self._most, len(met.members))
        attempt = Attempt(self._tries, begun, met, computes, self._clock.now() - begun)
        self._take_sides(attempt)
        held = self._holding.held
        outcome, reason = self._carry_out(attempt)
        self._events.emit(
            "attempt",
            attempt.step,
            attempt=attempt.number,
            quorum_id=met.id,
            committed=isinstance(outcome, Commit),
            reason=reason,
            computed=list(held.computed),
            recomputed=sorted(held.recomputed),
            took_s=round(self._clock.now() - begun, 4),
        )
        held.computed.clear()
        held.recomputed.clear()
        if isinstance(outcome, Commit) and self.group not in attempt.plan.shares:
            self._follow(outcome)
            return Turn.FOLLOWED
        return outcome

    def _carry_out(self, attempt: Attempt) -> tuple[Commit | Turn, str]:
        """What the attempt came to, and why if it failed."""
        try:
            self._connect(attempt.quorum)
            self._exchange_rows(attempt)
            self._compute(attempt)
            tally = self._sum(attempt)
        except AttemptFailed as failed:
            return Turn.RETRY, str(failed)
        if tally.exhausted:
            has_state = self.group in attempt.plan.shares
            return Turn.OUT_OF_DATA if has_state else Turn.TOO_LATE, "the data ended"
        return self._commit(attempt, tally), ""

    def _begin(self) -> Turn | None:
        """Settle what all ranks begin with; what the attempt came to where it ends here.

        Raises:
            GroupBroken: the ranks have different states.
            GaveUp: no commit for too long.
        """
        self._files.beat("quorum", self.state.step + 1)
        healing = self._healing
        waited_s = self._clock.now() - self._progress
        mine = Beginning(
            step=self.state.step,
            history=self.state.history,
            over=self._asker.over(self.state.step),
            asked_to_leave=self._files.asked_to_leave(),
            gives_up=waited_s > self._rules.timeouts.give_up.total_seconds(),
            lost_peers=self._connected is not None and not self._sums.size,
            state_is_here=healing is not None and not healing.error and healing.fetch.state is not None,
            heal_failed=healing.error if healing is not None else "",
            slot_us=self._holding.pace.slot_us,
        )
        ranks = [Beginning(*said) for said in self.decisions.gather("begin", mine)]
        if len({(rank.step, rank.history) for rank in ranks}) > 1:
            raise GroupBroken(f"the ranks of this group are at different steps or histories: {ranks}")
        if any(rank.gives_up for rank in ranks):
            raise GaveUp(f"no step could be committed for {waited_s:.0f} s; see this group's events for the reasons")
        if over := ranks[0].over:
            return Turn[over]
        self.leaving = any(rank.asked_to_leave for rank in ranks)
        self._slot_us = max(rank.slot_us for rank in ranks)
        if any(rank.lost_peers for rank in ranks):
            self._disconnect()
        if healing is not None and all(rank.state_is_here for rank in ranks):
            self._take_over(healing)
            return Turn.CAUGHT_UP
        if healing is not None and (reason := next(filter(None, (rank.heal_failed for rank in ranks)), "")):
            step = healing.state.step + 1
            self._events.emit("heal_failed", step, source_groups=healing.sources, reason=reason)
            self._give_up_healing()
        return None

    def meet(self, *, finishing: bool = False) -> Quorum | Turn | None:
        """See `Asker.ask`. `finishing`: this group makes no more steps, and says so."""
        if self._next is not None and len(self._next.able) < len(self._next.members):
            self._disconnect()  # those that follow do not know that it was the last step
        self._next = None
        connected = self._connected.key if self._connected is not None else ""
        follows = self._healing.follows if self._healing is not None else NOTHING
        return self._asker.ask(self.state, follows, finishing=finishing, connected=connected)

    def _take_sides(self, attempt: Attempt) -> None:
        """Compute on, or begin to heal; and open the state to those who heal from here."""
        quorum = attempt.quorum
        if attempt.computes:
            self._give_up_healing()
        else:
            self._holding.drop()
        if self.group in quorum.sources:
            self._heal_from(quorum.sources[self.group], attempt)
        if any(self.group in lenders for lenders in quorum.sources.values()):
            self._door.serve(quorum.state.step, quorum.state.history, self._work.serve())

    def _heal_from(self, sources: tuple[int, ...], attempt: Attempt) -> None:
        quorum = attempt.quorum
        self._give_up_healing()
        self._files.beat("heal", attempt.step)
        if self.state != NOTHING:
            self._events.emit(
                "history_left",
                self.state.step,
                history=f"{self.state.history:x}",
                for_step=quorum.state.step,
                for_history=f"{quorum.state.history:x}",
            )
        doors = [quorum.member(source).doors[self.decisions.rank] for source in sources]
        fetch = self._door.fetch(doors, quorum.state.step, quorum.state.history, self._work.serve())
        self._healing = Healing(sources, quorum.state, fetch)

    def _give_up_healing(self) -> None:
        if self._healing is not None:
            self._healing.fetch.let_go()
            self._healing = None

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
        known = self._connected
        stays = known is not None and quorum.connected_in() == known.key and quorum.groups == known.groups
        if known is quorum or stays:
            return
        self._disconnect()
        self._files.beat("connect", quorum.state.step + 1)
        host, place_of = quorum.member(quorum.able[0]), quorum.groups.index  # joiners, which have no state, may go
        peers = tuple(member.watches[self.decisions.rank] for member in quorum.members)
        place = Place(quorum.key, host.store, place_of(host.group), place_of(self.group), peers)
        self._with_peers("connect", lambda: self._sums.connect(place))
        self._connected = quorum

    def _exchange_rows(self, attempt: Attempt) -> None:
        """Learn what the groups hold and plan."""
        quorum, rules = attempt.quorum, self._rules
        mine = self._row(attempt)
        attempt.rows = rows = self._with_peers("rows", lambda: self._gather_rows(mine, attempt))
        audited = ledger.audited_slots(rules.seed, attempt.step, rules.slots, rules.audit_slots)
        attempt.plan = ledger.plan(rows, rules.slots, rules.dealing, audited)
        self._events.emit(
            "quorum",
            attempt.step,
            attempt=attempt.number,
            quorum_id=quorum.id,
            groups=list(quorum.groups),
            joiners=[row.group for row in rows if not row.computes],
            history=f"{quorum.state.history:x}",
            wait_s=round(attempt.waited_s, 4),
        )
        self._heed_audit(attempt)
        self._tell_pace(attempt)
        self._holding.heed(attempt.plan, attempt.step)
        if self.group in attempt.plan.drops:
            self._holding.drop()

    def _row(self, attempt: Attempt) -> ledger.Row:
        quorum, computes, held = attempt.quorum, attempt.computes, self._holding.held
        # A group that nobody else can confirm looks twice: the first error may have been transient.
        looks = 1 if len(quorum.able) > 1 else ledger.ASK_AFTER
        return ledger.Row(
            group=self.group,
            quorum=quorum.key,
            step=self.state.step,
            history=self.state.history,
            computes=computes,
            checksum=self._checksum if computes else None,
            proven=self._proven,
            slot_us=self._slot_us,
            held=frozenset(held.slots),
            refused=frozenset(held.refused),
            disputed=frozenset(slot for slot, times in held.refused.items() if times >= ledger.ASK_AFTER),
            not_finite=frozenset(slot for slot, times in held.not_finite.items() if times >= looks),
        )

    def _gather_rows(self, mine: ledger.Row, attempt: Attempt) -> list[ledger.Row]:
        # Where nobody was asked, one that is busy is waited for here, and as long as in a quorum.
        late = min(self._rules.timeouts.reduce, self._rules.timeouts.join)
        try:
            rows = list(map(ledger.Row.decode, self._sums.gather(mine.encode(), late)))
        except UnfitError as error:
            raise SumsBroken(str(error)) from error
        if objection := ledger.objection(rows, attempt.quorum):
            raise SumsBroken(objection)
        return rows

    def _heed_audit(self, attempt: Attempt) -> None:
        """Draw this group's conclusions from the checksums in the rows. Raises GroupBroken: most groups have others."""
        differing = ledger.differing_groups(attempt.rows)
        if self._checksum is not None and attempt.computes:
            self._proven = self.group not in differing
            told = {"agreed": not differing, "differing": sorted(differing)}
            self._events.emit("audit", self.state.step, checksum=f"{self._checksum:016x}", **told)
        if self.group in differing:
            raise GroupBroken("an audit found that this group's parameters differ from those of most groups")
        if self._healing is not None and not differing.isdisjoint(self._healing.sources):
            self._give_up_healing()

    def _tell_pace(self, attempt: Attempt) -> None:
        """Say when this group has become slow, and when it is not any more."""
        pace = attempt.plan.paces.get(self.group, 1.0)
        if (pace > 1.0) != self._is_slow:
            self._is_slow = pace > 1.0
            self._events.emit("straggler", attempt.step, pace=pace)

    def _compute(self, attempt: Attempt) -> None:
        """Compute the share; what comes of it is held."""
        share, begun = attempt.plan.shares.get(self.group, ()), self._clock.now()
        self._reducer.begin(self._sums, self._patience(attempt, share), attempt.step)
        self._holding.compute(attempt, share)
        attempt.compute_s = self._clock.now() - begun

    def _patience(self, attempt: Attempt, share: Sequence[int]) -> timedelta:
        """For the gradients' sums: groups with a smaller share than others are there earlier. Never so long that this
        group's own watchdog would take it for stalled."""
        timeouts, plan, slot_s = self._rules.timeouts, attempt.plan, self._holding.pace.slot_s
        most = max(plan.loads.values(), default=0)
        ahead, longest = most - plan.loads.get(self.group, 0), max(timeouts.compute, timeouts.reduce)
        if not share or slot_s is None:
            return longest if ahead else timeouts.reduce
        of_fastest = timedelta(seconds=slot_s / plan.paces[self.group])
        patience = min(timeouts.reduce + 2 * ahead * of_fastest, longest)
        known = all(row.slot_us for row in attempt.rows if plan.shares.get(row.group))
        return min(patience, self._late(attempt) + most * of_fastest) if known else patience

    def _late(self, attempt: Attempt) -> timedelta:
        """After how long a sum is late for which all have computed what they had to: longer than usual, and than a busy
        host pauses. Then all hold what they have, and the next quorum does without a group that is silent. A retry is
        as patient as its timeouts, and so is a round, which is computed anew if it is given up."""
        timeouts, usual = self._rules.timeouts, timedelta(microseconds=self._waits.slot_us)
        first = attempt.number == 1 and usual and not self._rules.dealing.homes
        return min(timeouts.reduce, timeouts.pause + USUAL * usual) if first else timeouts.reduce

    def _sum(self, attempt: Attempt) -> ledger.Tally:
        """Sum gradients and tally over the groups; the tally of the step, if it is to be committed."""
        begun, step = self._clock.now(), attempt.step
        results = self._work.results()
        self._work.settle()
        self._files.beat("reduce", step)
        broken = ""
        try:
            self._reducer.finish()
        except SumsBroken as error:
            broken = str(error)
        summed, unsound = self._holding.judge_sums(attempt, results.slots, broken)
        if not summed:
            self._disconnect()
            raise AttemptFailed(broken or "another rank of this group did not get its sum")
        mine = ledger.Tally(
            coverage=tuple(int(slot in self._holding.held.slots) for slot in range(self._rules.slots)),
            sums=results,
            leaving=int(self.leaving),
            exhausted=int(attempt.exhausted),
            refused=int(attempt.refused),
            wanting=int(self.leaving or self._wants_quorum(attempt)),
            bits=tuple(self._holding.bits(attempt.plan)),
        )
        tally: ledger.Tally | None = None
        reason = unsound
        self._files.beat("reduce", step)  # `_patience` is that of the sums alone
        try:
            tally = self._tally(mine, attempt)
        except SumsBroken as error:
            reason = str(error)
            self._sums.abort()
        else:
            # Where a slot is missing because the data ended, that is what there is to say.
            if not tally.exhausted:
                reason = ledger.verdict(tally, self._rules.dealing.on_loss) or unsound
            if ledger.differing_bits(tally, attempt.plan):
                reason = reason or OTHER_BITS
        attempt.reduce_s = self._clock.now() - begun
        self._files.beat("vote", step)
        digest = tally.digest() if tally is not None else 0
        wanting = tally.wanting if tally is not None else 0
        votes = self.decisions.gather("vote", [tally is not None and not reason, digest, wanting])
        same = len({digest for _, digest, _ in votes}) == 1
        attempt.wanted = any(wanting for _, _, wanting in votes)
        if tally is not None and same:
            self._holding.heed_bits(attempt, tally)
        if tally is None or not same or not all(yes for yes, _, _ in votes):
            if not same or reason != OTHER_BITS:  # else all groups know it, and nothing is wrong between them
                self._disconnect()
            raise AttemptFailed(reason or "another rank of this group did not see the same sum")
        return tally

    def _wants_quorum(self, attempt: Attempt) -> bool:
        """Whether this rank wants one before the next step: somebody waits for it, it has no source to heal from, it
        has healed and the gate is to know that, or at least half are away, and may make these steps too."""
        healing, told = self._healing, self._membership is not None and self._membership.wanted
        heals = healing is not None and not healing.error
        stays = self.group in attempt.quorum.able if attempt.computes else heals
        return told or not stays or 2 * len(attempt.quorum.members) <= self._most

    def _tally(self, mine: ledger.Tally, attempt: Attempt) -> ledger.Tally:
        """The sum of the groups' tallies, after which they tell each other notes if any are due. Raises SumsBroken."""
        total = self._sums.total(mine.encode(), self._late(attempt))
        notes = self._work.notes(attempt.step)
        if notes is not None:
            self._work.noted(self._sums.gather(notes))
        return ledger.Tally.decode(total, self._rules.slots, len(attempt.plan.audited))

    def _commit(self, attempt: Attempt, tally: ledger.Tally) -> Commit:
        quorum, held, planned = attempt.quorum, self._holding.held, attempt.plan.owners
        self._waits.take(attempt.reduce_s, 1)
        self._most -= tally.leaving
        owners = tuple(planned[slot] if count else -1 for slot, count in enumerate(tally.coverage))
        faults = ledger.at_fault(self.group, attempt.rows, held.asked, owners)
        able, parent = tuple(sorted(attempt.plan.shares)), quorum.state.history
        history = ledger.extend(parent, attempt.step, quorum.key)
        if not attempt.wanted:
            self._connected = self._next = quorum.moved_on(State(attempt.step, history), able)
        return Commit(
            step=attempt.step,
            history=history,
            parent=parent,
            tokens=tally.sums.tokens,
            loss=tally.sums.loss,
            extra=tally.sums.extra,
            owners=owners,
            groups=quorum.groups,
            able=able,
            all_leave=tally.leaving == len(quorum.members),
            unfit=tuple(sorted(faults & held.refused_here)),
            quorum_id=quorum.id,
            attempts=attempt.number,
            compute_s=attempt.compute_s,
            reduce_s=attempt.reduce_s,
            took_s=self._clock.now() - attempt.begun,
        )

    def _follow(self, commit: Commit) -> None:
        """Keep a commit for when the state is here that it is to be applied to."""
        if self._healing is not None:
            self._healing.keep(commit, self._reducer)
        self._holding.start()
        self._tries, self._progress = 0, self._clock.now()

    def _disconnect(self) -> None:
        self._sums.abort()
        self._connected = self._next = None
