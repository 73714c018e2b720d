"""The step protocol: takes one rank from a committed step to the next, whatever happens to the other groups.

An attempt (`StepProtocol.attempt`) is a fixed sequence of decisions of the whole group (`everstep.step.decisions`):

1. begin: the ranks check that they have the same step and history, and settle whether the group leaves or has healed.
2. quorum: the group reuses the last quorum if its last attempt committed and no rank asked for a new one. Otherwise
   rank 0 asks the lighthouse and tells the other ranks. From the members alone, each group computes which state counts,
   and which groups copy it from which (`everstep.quorum.request`).
3. connect: the members build a new process group if they have changed or the last one broke.
4. rows: each group tells which slots it holds and refused, and its quorum, step and history. From equal rows each group
   makes the same plan (`ledger.plan`).
5. compute: the group computes its share (`everstep.step.holding`). Gradients accumulate in `param.grad`, losses as
   sums. Then the gradients are summed over the groups (`everstep.step.reduction`).
6. tally: the groups sum how often each slot was added, tokens, losses, and requests for a new quorum. If all ranks saw
   the same tally, with every slot exactly once and none refused, they commit. Otherwise the next attempt, a retry,
   keeps what the group holds.

A group that joins computes in its first step if its state comes soon. Otherwise it never makes the others wait: it adds
zeros to the sums and keeps the summed gradients of each step. Once its state has arrived, it applies them in order, a
few in each step. Until then it keeps the state it had.
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
from everstep.step.attempt import Attempt, Beginning, Group, Healing, Host, Outcome, Rules
from everstep.step.decisions import Decisions
from everstep.step.holding import OTHER_BITS, Holding
from everstep.step.interfaces import Commit, Work
from everstep.step.median_time import MedianTime
from everstep.step.reduction import GradientReducer

USUAL = 3
"""The sums of a first attempt may take this multiple of their usual wait, plus `Timeouts.pause`."""

AT_ONCE = 4
"""Commits that a group which heals applies in one step. The others wait for it in the last of these steps only, in
which it has no more than so many left. If it applied all at once, it would be left out, and have to heal again."""

T = TypeVar("T")


class GaveUp(RuntimeError):
    """No step was committed for `Timeouts.give_up`."""


class AttemptFailed(Exception):
    """The attempt commits nothing, and all ranks of the group know that. The message is the reason this rank knows."""


class StepProtocol:
    """Makes one rank's attempts at steps.

    Args:
        group: the group of this rank.
        rules: settings of the protocol.
        work, reducer: the trainer, and what sums its gradients.
        host: clock, run directory and event log of this rank.
    """

    def __init__(self, *, group: Group, rules: Rules, work: Work, reducer: GradientReducer, host: Host) -> None:
        self.group, self._rules, self._work, self._reducer = group.id, rules, work, reducer
        self._sums, self._state_server, self._membership = group.sums, group.state_server, group.membership
        self._clock, self._files, self._events = host.clock, host.files, host.events
        self.decisions = Decisions(group.ranks)
        self._asker = Asker(group, self.decisions, host, rules)
        self._holding = Holding(work, reducer, self.decisions, host, group.id)
        self.state = NOTHING
        self.leaving = False
        """Whether this group stops after the next commit. Each attempt decides this anew."""
        self._checksum: int | None = None
        """Checksum of the state's parameters, if an audit of it is due."""
        self._proven = False
        """Whether an audit has confirmed this group's parameters since it last took over a state."""
        self._healing: Healing | None = None
        self._connected: Quorum | None = None
        """Quorum of the process group that this rank is connected in."""
        self._next: Quorum | None = None
        """The last attempt's quorum, moved on by its commit, if the next attempt reuses it instead of asking."""
        self._groups_in_run = rules.dealing.groups
        """How many groups the run has: as many as at its start or in the largest quorum since, less those that left."""
        self._tries = 0
        self._slot_us = 0
        """Microseconds per slot on the slowest rank of this group (`ledger.Row.slot_us`)."""
        self._is_slow = False
        self._waits = MedianTime()
        """How long this rank usually waits for sums after it has computed its share."""
        self._progress = host.clock.now()

    # The state

    def restored(self, step: int, history: int) -> None:
        """Go on from the state after `step` (0: a fresh start), which the caller has loaded."""
        self._give_up_healing()
        self._set_state(State(step, history), self._work.checksum())

    def apply(self, commit: Commit) -> None:
        """Make the optimizer step of a commit. All ranks of the group call this."""
        self._state_server.close()
        self._work.apply(commit)
        self._set_state(State(commit.step, commit.history), self._work.checksum())

    def _set_state(self, state: State, checksum: int | None) -> None:
        self.state, self._checksum = state, checksum
        self._holding.start()
        self._tries, self._progress = 0, self._clock.now()

    def _catch_up(self, healing: Healing, most: int) -> None:
        """Load the healed state, if that is not done yet. Then apply the first `most` commits that were made since it.
        The heal is over when none is left."""
        if not healing.loaded:
            self._state_server.close()
            self._work.heal(healing.fetch.state)
            self._set_state(healing.state, None)
            self._proven, healing.loaded = False, True
            self._events.emit(
                "heal",
                healing.state.step + 1,
                source_groups=healing.sources,
                history=f"{healing.state.history:x}",
                bytes=healing.fetch.nbytes,
                took_s=round(healing.fetch.took_s, 4),
                caught_up=len(healing.commits),
            )
        for commit, sums in healing.commits[:most]:
            self._files.beat("heal", commit.step)
            self._reducer.unstash(sums)
            self.apply(commit)
        del healing.commits[:most]
        if not healing.commits:
            self._healing = None

    # An attempt

    def attempt(self) -> Commit | Outcome | Quorum:
        """Make one attempt at the next step.

        Returns:
            a commit, which the caller has to `apply` before the next attempt; or a quorum in which no group has a
            state, so that each member has to restore one (`restored`); else an outcome.

        Raises:
            GroupBroken: this group has to restart.
            GaveUp: see `Timeouts.give_up`.
        """
        if outcome := self._begin():
            return outcome
        self._tries += 1
        begun = self._clock.now()
        quorum = self._next or self.ask_quorum()
        self._next = None
        if isinstance(quorum, Outcome):
            return quorum
        if quorum is None:
            return Outcome.LEFT if self.leaving else Outcome.RETRY
        if quorum.is_finishing():
            return Outcome.OVER if self.group in quorum.able else Outcome.RETRY
        if self.group in quorum.left_out:
            self._disconnect()
            self._progress = self._clock.now()  # no reason to give up: the others go on, and report this group
            return Outcome.LEFT if self.leaving else Outcome.RETRY
        if quorum.state == NOTHING:
            return quorum
        if (healing := self._healing) is not None and healing.loaded and healing.follows.step > quorum.state.step:
            self._catch_up(healing, len(healing.commits))  # the groups that made these steps are gone
            return Outcome.CAUGHT_UP
        computes = self.state == quorum.state
        self._groups_in_run = max(self._groups_in_run, len(quorum.members))
        attempt = Attempt(self._tries, begun, quorum, computes, self._clock.now() - begun)
        self._start_or_stop_healing(attempt)
        outcome, reason = self._carry_out(attempt)
        held = self._holding.held  # another one than before, if the group has healed
        self._events.emit(
            "attempt",
            attempt.step,
            attempt=attempt.number,
            quorum_id=quorum.id,
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
            return Outcome.FOLLOWED
        return outcome

    def _carry_out(self, attempt: Attempt) -> tuple[Commit | Outcome, str]:
        """Make the attempt; return its outcome and, if it failed, the reason."""
        try:
            self._connect(attempt.quorum)
            self._heal_at_once(attempt)
            self._exchange_rows(attempt)
            self._compute(attempt)
            tally = self._sum(attempt)
        except AttemptFailed as failed:
            return Outcome.RETRY, str(failed)
        if tally.exhausted:
            has_state = self.group in attempt.plan.shares
            return Outcome.OUT_OF_DATA if has_state else Outcome.TOO_LATE, "the data ended"
        return self._commit(attempt, tally), ""

    def _begin(self) -> Outcome | None:
        """Let the ranks agree on what each of them knows. Return the outcome if the attempt ends here, else None.

        Raises:
            GroupBroken: the ranks have different states.
            GaveUp: see `Timeouts.give_up`.
        """
        self._files.beat("quorum", self.state.step + 1)
        healing = self._healing
        waited_s = self._clock.now() - self._progress
        mine = Beginning(
            step=self.state.step,
            history=self.state.history,
            ending=self._asker.ending(self.state.step),
            asked_to_leave=self._files.asked_to_leave(),
            gives_up=waited_s > self._rules.timeouts.give_up.total_seconds(),
            lost_peers=self._connected is not None and not self._sums.size,
            state_is_here=healing is not None and not healing.error and healing.fetch.state is not None,
            heal_failed=healing.error if healing is not None else "",
            slot_us=self._holding.slot_time.steady_us,
        )
        ranks = [Beginning(*said) for said in self.decisions.gather("begin", mine)]
        if len({(rank.step, rank.history) for rank in ranks}) > 1:
            raise GroupBroken(f"the ranks of this group are at different steps or histories: {ranks}")
        if any(rank.gives_up for rank in ranks):
            raise GaveUp(f"no step could be committed for {waited_s:.0f} s; see this group's events for the reasons")
        if ending := ranks[0].ending:
            return Outcome[ending]
        self.leaving = any(rank.asked_to_leave for rank in ranks)
        self._slot_us = max(rank.slot_us for rank in ranks)
        if any(rank.lost_peers for rank in ranks):
            self._disconnect()
        if healing is not None and all(rank.state_is_here for rank in ranks):
            are_few = len(healing.commits) <= AT_ONCE
            self._catch_up(healing, AT_ONCE if are_few else 0)
            if are_few:
                return Outcome.CAUGHT_UP
        if healing is not None and (reason := next(filter(None, (rank.heal_failed for rank in ranks)), "")):
            step = healing.state.step + 1
            self._events.emit("heal_failed", step, source_groups=healing.sources, reason=reason)
            self._give_up_healing()
        return None

    def ask_quorum(self, *, finishing: bool = False) -> Quorum | Outcome | None:
        """Ask for a new quorum; see `Asker.ask`. `finishing`: whether this group makes no more steps."""
        if self._next is not None and len(self._next.able) < len(self._next.members):
            self._disconnect()  # joiners do not know that this was the last step: this ends their wait for rows
        self._next = None
        connected = self._connected.key if self._connected is not None else ""
        follows = self._healing.follows if self._healing is not None else NOTHING
        return self._asker.ask(self.state, follows, finishing=finishing, connected=connected)

    def _start_or_stop_healing(self, attempt: Attempt) -> None:
        """Start or stop healing as the quorum says. Open this group's state to joiners that heal from it."""
        quorum = attempt.quorum
        if attempt.computes:
            self._give_up_healing()
        else:
            self._holding.drop()
        if any(self.group in lenders for lenders in quorum.sources.values()):
            self._state_server.serve(quorum.state.step, quorum.state.history, self._work.serve())
        if sources := quorum.sources.get(self.group):
            self._give_up_healing()
            self._files.beat("heal", attempt.step)
            addresses = [quorum.member(source).state_addresses[self.decisions.rank] for source in sources]
            fetch = self._state_server.fetch(addresses, quorum.state.step, quorum.state.history, self._work.serve())
            self._healing = Healing(sources, quorum.state, fetch)

    def _heal_at_once(self, attempt: Attempt) -> None:
        """If the state that this group began to fetch in this attempt arrives soon, take it over: the group then
        computes in this step already. The others wait for its row meanwhile."""
        healing, begins = self._healing, self.group in attempt.quorum.sources
        if healing is not None and begins and self.decisions.all_true("soon", healing.fetch.comes_soon()):
            self._catch_up(healing, 0)
            attempt.computes = True

    def _give_up_healing(self) -> None:
        if self._healing is not None:
            self._healing.fetch.let_go()
            self._healing = None

    def _with_peers(self, point: str, collective: Callable[[], T]) -> T:
        """Return the result of `collective`, a call over groups. Raises AttemptFailed if it failed on any rank."""
        results: list[T] = []
        reason = "another rank of this group could not reach the other groups"
        try:
            results.append(collective())
        except SumsBroken as broken:
            reason = str(broken)
        if not self.decisions.all_true(point, bool(results)):
            self._disconnect()
            raise AttemptFailed(reason)
        return results[0]

    def _connect(self, quorum: Quorum) -> None:
        """Build the process group of a quorum, unless its members are already connected in one."""
        known = self._connected
        stays = known is not None and quorum.connected_in() == known.key and quorum.groups == known.groups
        if known is quorum or stays:
            return
        self._disconnect()
        self._files.beat("connect", quorum.state.step + 1)
        host, place_of = quorum.member(quorum.able[0]), quorum.groups.index  # not a joiner's store: joiners may leave
        peers = tuple(member.watches[self.decisions.rank] for member in quorum.members)
        place = Place(quorum.key, host.store, place_of(host.group), place_of(self.group), peers)
        self._with_peers("connect", lambda: self._sums.connect(place))
        self._connected = quorum

    def _exchange_rows(self, attempt: Attempt) -> None:
        """Learn what each group holds and plan the attempt."""
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
        self._act_on_audit(attempt)
        self._tell_pace(attempt)
        self._holding.note_plan(attempt.plan, attempt.step)
        if self.group in attempt.plan.drops:
            self._holding.drop()

    def _row(self, attempt: Attempt) -> ledger.Row:
        quorum, computes, held = attempt.quorum, attempt.computes, self._holding.held
        # If no other group can confirm a non-finite gradient, compute it twice: the first error may be transient.
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
        # If the quorum was reused, this is where a busy group is waited for, and for as long as in a new quorum.
        late = min(self._rules.timeouts.reduce, self._rules.timeouts.join)
        try:
            rows = list(map(ledger.Row.decode, self._sums.gather(mine.encode(), late)))
        except UnfitError as error:
            raise SumsBroken(str(error)) from error
        if reason := ledger.why_not_sum(rows, attempt.quorum):
            raise SumsBroken(reason)
        return rows

    def _act_on_audit(self, attempt: Attempt) -> None:
        """Act on the checksums in the rows. Raises GroupBroken if this group's differs from that of most groups."""
        differing = ledger.differing_groups(attempt.rows)
        if self._checksum is not None and attempt.computes:
            self._proven = self.group not in differing
            self._events.emit("audit", self.state.step, checksum=f"{self._checksum:016x}", differing=sorted(differing))
        if self.group in differing:
            raise GroupBroken("an audit found that this group's parameters differ from those of most groups")
        if self._healing is not None and not differing.isdisjoint(self._healing.sources):
            self._give_up_healing()

    def _tell_pace(self, attempt: Attempt) -> None:
        """Emit an event when this group has become slow, and when it is not slow any more."""
        pace = attempt.plan.paces.get(self.group, 1.0)
        if (pace > 1.0) != self._is_slow:
            self._is_slow = pace > 1.0
            self._events.emit("straggler", attempt.step, pace=pace)

    def _compute(self, attempt: Attempt) -> None:
        """Compute and hold this group's share. While the others compute, a group that heals catches up."""
        if self._healing is not None and self._healing.loaded:
            self._catch_up(self._healing, AT_ONCE)
        share, begun = attempt.plan.shares.get(self.group, ()), self._clock.now()
        self._reducer.begin(self._sums, self._gradient_timeout(attempt, share), attempt.step)
        self._holding.compute(attempt, share)
        attempt.compute_s = self._clock.now() - begun

    def _gradient_timeout(self, attempt: Attempt, share: Sequence[int]) -> timedelta:
        """Return the timeout of a gradient sum. A group with a smaller share than others is done earlier and so waits
        longer, but never so long that its own watchdog takes it for stalled."""
        timeouts, plan, slot_s = self._rules.timeouts, attempt.plan, self._holding.slot_time.latest_s
        most = max(plan.loads.values())
        ahead, longest = most - plan.loads.get(self.group, 0), max(timeouts.compute, timeouts.reduce)
        if not share or slot_s is None:
            return longest if ahead else timeouts.reduce
        of_fastest = timedelta(seconds=slot_s / plan.paces[self.group])
        patience = min(timeouts.reduce + 2 * ahead * of_fastest, longest)
        known = all(row.slot_us for row in attempt.rows if plan.shares.get(row.group))
        return min(patience, self._sum_timeout(attempt) + most * of_fastest) if known else patience

    def _sum_timeout(self, attempt: Attempt) -> timedelta:
        """Return how long a sum may take once all groups have computed: more than usual, and than a busy host pauses.
        After that the attempt fails, all keep what they hold, and the next quorum leaves out a silent group. It is
        `reduce` until a wait is known, for a retry, and for a semi-synchronous round: that is computed anew."""
        timeouts, usual = self._rules.timeouts, timedelta(microseconds=self._waits.steady_us)
        first = attempt.number == 1 and usual and not self._rules.dealing.homes
        return min(timeouts.reduce, timeouts.pause + USUAL * usual) if first else timeouts.reduce

    def _sum(self, attempt: Attempt) -> ledger.Tally:
        """Sum gradients and tally over the groups; return the tally. Raises AttemptFailed if that is not the step."""
        begun, step = self._clock.now(), attempt.step
        results = self._work.results()
        self._work.await_snapshot()
        self._files.beat("reduce", step)
        broken = ""
        try:
            self._reducer.finish()
        except SumsBroken as error:
            broken = str(error)
        summed, unsound = self._holding.judge_sums(attempt, results, broken)
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
        self._files.beat("reduce", step)  # `_gradient_timeout` is for the gradients' sums alone
        try:
            tally = self._tally(mine, attempt)
        except SumsBroken as error:
            reason = str(error)
            self._sums.abort()
        else:
            # If the data ended, slots are missing for that reason: no other is given.
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
            self._holding.compare_bits(attempt, tally)
        if tally is None or not same or not all(yes for yes, _, _ in votes):
            if not same or reason != OTHER_BITS:  # else all groups fail the attempt alike: their connections stay
                self._disconnect()
            raise AttemptFailed(reason or "another rank of this group did not see the same sum")
        return tally

    def _wants_quorum(self, attempt: Attempt) -> bool:
        """Whether this rank wants a new quorum before the next step: another group waits for one; this group has no
        source that answers, or has healed, which the gate must learn; or half the groups or more are away, and might
        make the same steps apart from these."""
        healing, told = self._healing, self._membership is not None and self._membership.wanted
        heals = healing is not None and not healing.error and healing.fetch.is_answered
        stays = self.group in attempt.quorum.able if attempt.computes else heals
        return told or not stays or 2 * len(attempt.quorum.members) <= self._groups_in_run

    def _tally(self, mine: ledger.Tally, attempt: Attempt) -> ledger.Tally:
        """Return the sum of the groups' tallies, and exchange notes if any are due. Raises SumsBroken."""
        total = self._sums.total(mine.encode(), self._sum_timeout(attempt))
        notes = self._work.own_notes(attempt.step)
        if notes is not None:
            self._work.receive_notes(self._sums.gather(notes, self._rules.timeouts.reduce))
        return ledger.Tally.decode(total, self._rules.slots, len(attempt.plan.audited))

    def _commit(self, attempt: Attempt, tally: ledger.Tally) -> Commit:
        quorum, held, planned = attempt.quorum, self._holding.held, attempt.plan.owners
        self._waits.take(attempt.reduce_s, 1)
        self._groups_in_run -= tally.leaving
        owners = tuple(planned[slot] if count else -1 for slot, count in enumerate(tally.coverage))
        faults = ledger.at_fault(self.group, attempt.rows, held.asked, owners)
        able, parent = tuple(sorted(attempt.plan.shares)), quorum.state.history
        history = ledger.next_history(parent, attempt.step, quorum.key)
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
        """Keep a commit until the state that it applies to has arrived."""
        if self._healing is not None:
            self._healing.keep(commit, self._reducer)
        self._holding.start()
        self._tries, self._progress = 0, self._clock.now()

    def _disconnect(self) -> None:
        self._sums.abort()
        self._connected = self._next = None
