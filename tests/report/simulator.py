"""A run of replica groups played through in virtual time: it logs what a real run logs, and knows the truth.

Every group carries its own history of commits. A move says what happens in the next attempt; the truth is
taken from the histories, the log is written beside it, and a group that dies says nothing any more.
"""

import random
from dataclasses import dataclass, field

from timeline import Timeline

FAILING = ("kill", "forget", "fail")
MOVES = ("go", "lag", "orphan", "lose", "dispute", *FAILING, "kill-all", "revive", "save")
SAMPLES_PER_SLOT = 4


@dataclass(eq=False)
class Committed:
    step: int
    loss: float
    history: str = ""
    lost: int = 0
    repeated: int = 0


@dataclass
class Truth:
    attempts: int = 0
    thrown_away: int = 0
    recomputed: int = 0
    kills: int = 0
    rejoins: list[float] = field(default_factory=list)
    final: tuple[Committed, ...] = ()

    @property
    def curve(self):
        return {commit.step: commit.loss for commit in self.final}

    def samples(self, name):
        return sum(getattr(commit, name) for commit in self.final) * SAMPLES_PER_SLOT


@dataclass
class Group:
    """A running group: its state, the slots it holds of the next step, and those that a bug made it lose."""

    history: tuple[Committed, ...]
    held: set[int] = field(default_factory=set)
    forgotten: set[int] = field(default_factory=set)


def named(history):
    """The state after these commits, as events name it."""
    return history[-1].history if history else "start"


class Simulator:
    def __init__(self, groups, slots, seed):
        batch = slots * SAMPLES_PER_SLOT
        self.log = Timeline().add(0, "run_started", role="supervisor", groups=groups, global_batch_size=batch)
        self.random = random.Random(seed)
        self.slots, self.t = slots, 1.0
        self.up: dict[int, Group] = {}
        self.killed_at: dict[int, list[float]] = {group: [] for group in range(groups)}
        self.saved = {"disk": (), "memory": ()}
        self.steps_computed: set[int] = set()
        self.truth = Truth()
        for group in range(groups):
            self.start(group)

    def events(self):
        """The log, after one last step in peace, so that all groups end in the final state."""
        self.play("go", 0)
        self.truth.final = next(iter(self.up.values())).history
        return self.log.events

    def play(self, move, which):
        if move == "revive":
            down = sorted(self.killed_at.keys() - self.up.keys())
            if down:
                self.start(down[which % len(down)])
        elif move == "save":
            number, group = sorted(self.up.items())[which % len(self.up)]
            if group.history:
                self.t += 0.05
                self.saved["disk"] = group.history
                self.log.add(self.t, "checkpoint_saved", number, len(group.history), path="step")
        else:
            self.attempt(move, which)

    def start(self, number, history=(), source="fresh"):
        self.t += 0.1
        self.up[number] = Group(history)
        self.log.add(self.t - 0.08, "workers_started", number, role="agent", incarnation=0, pids=[1])
        self.log.start(self.t, number, step=len(history) + 1, source=source, history=named(history))

    def kill(self, t, *numbers):
        self.log.fault(t, "kill-group", list(numbers))
        self.truth.kills += 1
        for number in numbers:
            self.log.add(t + 0.01, "workers_died", number, role="agent", reason="killed", exitcodes={"0": -9})
            del self.up[number]
            self.killed_at[number].append(t)

    def kill_all(self, which):
        """Everybody dies; one group or all load the same checkpoint, the others start empty and heal."""
        self.kill(self.t, *sorted(self.up))
        self.t += 1
        source = ("disk", "memory", "fresh")[which % 3]
        history = self.saved.get(source, ())
        self.saved["memory"] = history  # a better source that survived would have been used
        if not history:
            self.saved["disk"] = ()
        for number in sorted(self.killed_at):
            if history and (number == 0 or which % 2):
                self.start(number, history, source)
            else:
                self.start(number)

    def quorum(self, step):
        """Let the groups that are behind heal; returns those that were not and take part in `step`."""
        able = sorted(number for number, group in self.up.items() if len(group.history) == step - 1)
        for number, group in self.up.items():
            self.log.add(self.t + 0.01, "quorum", number, step, groups=able, wait_s=self.random.random() / 9)
            if number not in able:
                self.log.heal(self.t + 0.02, number, able[0], step, named(self.up[able[0]].history))
                self.up[number] = Group(self.up[able[0]].history)
            elif group.forgotten:
                group.held -= group.forgotten
        return able

    def attempt(self, move, which):
        step = max(len(group.history) for group in self.up.values()) + 1
        able = self.quorum(step)
        missing = sorted(set(range(self.slots)).difference(*(self.up[number].held for number in able)))
        shares = {number: missing[place :: len(able)] for place, number in enumerate(able)}
        took_s = self.random.uniform(0.5, 1.5)
        self.t += took_s
        if move == "kill-all":
            self.kill_all(which)
            return
        victim = sorted(self.up)[which % len(self.up)]
        others = [number for number in self.up if number != victim]
        if move == "kill" and others:
            self.kill(self.t - 0.2, victim)
        commits = {
            "orphan": [victim],
            "lag": others,
        }.get(move, list(self.up)) if others else list(self.up)  # fmt: skip
        if move in FAILING:
            commits = []
        for number, group in self.up.items():
            again = group.forgotten.intersection(shares.get(number, ()))
            self.log.attempt(
                self.t + self.random.uniform(0, 0.02), step, number, shares.get(number, ()),
                sorted(again), took_s - 0.03, committed=number in commits,
            )  # fmt: skip
        self.count_attempt(step, shares)
        for number, group in self.up.items():
            group.held |= set(shares.get(number, ()))
        if commits:
            self.commit(move, step, able, commits, which)
        if move == "orphan" and others:
            self.kill(self.t + 0.05, victim)
        if move == "forget":
            for group in self.up.values():
                group.forgotten |= group.held
        self.t += 0.1

    def count_attempt(self, step, shares):
        self.truth.attempts += 1
        computed = [slot for number in self.up for slot in shares.get(number, ())]
        if step in self.steps_computed:
            self.truth.recomputed += len(computed)
        elif computed:
            self.steps_computed.add(step)
        if any(self.up[number].forgotten.intersection(shares.get(number, ())) for number in self.up):
            self.truth.thrown_away += 1

    def commit(self, move, step, able, commits, which):
        commit, parent = Committed(step, self.random.random()), named(self.up[able[0]].history)
        owners = [next(number for number in able if slot in self.up[number].held) for slot in range(self.slots)]
        if move == "lose":
            owners[which % self.slots], commit.lost = -1, 1
        told = []
        for place, number in enumerate(commits):
            said = list(owners)
            if move == "dispute" and place == 1:
                said[which % self.slots] += 1
                commit.repeated = 1
            told.append((self.t + 0.03 + self.random.uniform(0, 0.01), said))
            whole = {"coverage_ok": move != "lose", "parent": parent}
            self.log.commit(told[-1][0], step, able, [number], said, commit.loss, **whole)
            commit.history = self.log.newest[step]
            self.up[number] = Group((*self.up[number].history, commit))
        t, owners = min(told)
        for number in able:
            if number in owners or len(able) > self.slots:
                self.truth.rejoins += [t - killed for killed in self.killed_at[number]]
                self.killed_at[number] = []
        if move != "orphan":
            self.saved["memory"] = self.up[commits[0]].history
