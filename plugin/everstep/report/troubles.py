"""Which guarantees of a run are degraded now: for each one sentence with its cause, and what to do.

The console, `everstep status`, the page, Prometheus and the webhook take them from here. Most follow from one event
(`ROWS`); the others from several: clocks that differ, snapshots that are skipped again and again, hosts
that a snapshot no longer survives, data that ended.
"""

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from everstep.run.events import shown

GUARANTEES = (
    "run", "group", "lighthouse", "reach", "snapshots", "hosts", "workers", "checkpoint", "machine", "arithmetic",
    "finite", "data", "pace", "clock",
)  # fmt: skip
"""What may be degraded; docs/monitoring.md says what each means."""

MOST = 50
"""Troubles that are told at once; of more the oldest are forgotten."""
GRACE_S = 5.0
"""What was to be tried again and failed again has said so by then."""
QUORUM_S = 5.0
"""A quorum that takes longer, asked for once or several times, is told; shorter ones are the price of a death."""
SKIPPED = 10
"""Snapshots that were due and not taken, one after the other, before that is told."""
CLOCKS_S = 60.0
"""By how much dates of one commit may differ."""
LONGEST = 600
"""Characters of a sentence: a reason may quote a whole message of somebody else's."""

AWAY = ("workers_died", "workers_started", "agent_ended")
"""Kinds of events of which the processes of a group that had something to tell are gone."""
NO_MEMORY = (
    "MemoryError", "out of memory", "control group was used", "can't allocate memory", "Cannot allocate memory",
    "bad_alloc",
)  # fmt: skip
"""Words of Python, devices, the kernel, PyTorch's CPU allocator and C++ for memory that is used up."""
EVERY_RANK = frozenset(("unfit", "not_finite", "snapshot_failed"))
"""Kinds of events that a rank tells for itself; of others rank 0 speaks for its group."""


class Fields(dict):
    """Of an event, which need not have all that its kind may have."""

    def __missing__(self, name: str) -> "Fields":
        return self

    def __format__(self, form: str) -> str:
        return "?"


@dataclass(frozen=True)
class Row:
    """What an event says to be degraded from now on. `sentence` and `who` are formats of the event's fields and of
    those of `_fields`."""

    guarantee: str
    sentence: str
    ends: tuple[str, ...] = ()
    who: str = ""
    when: Callable[[Mapping[str, Any]], bool] = lambda event: True
    once: bool = False
    """Whether it is told when it begins alone, and not each time that a group says so again in other words."""


@dataclass(frozen=True)
class Trouble:
    """One guarantee that does not hold."""

    row: Row
    who: str
    """The group, or what else it is of; "" for the whole run."""
    sentence: str
    event: Mapping[str, Any]
    """From which it follows."""

    def is_ended_by(self, event: Mapping[str, Any]) -> bool:
        """Whether it is over with a later event, or was to be told again by then if it were not."""
        begin = self.event
        if begin["kind"] == "resource_shortage" and event["t"] > begin["t"] + begin["again_s"] + GRACE_S:
            return True
        if self.row.who == "{group}" and begin.get("group") not in (None, event.get("group")):
            return False
        if begin["kind"] in ("left_out", "quorum_failed") and event["kind"] == "commit":
            waiting = begin["groups"] if begin["kind"] == "left_out" else [begin["group"]]
            return {*waiting} <= {*event["groups"]}
        if begin["kind"] == "quorum_failed" and event.get("group") != begin["group"]:
            return False
        is_later = (event.get("step") or 0) > (begin.get("step") or -1)
        return event["kind"] in self.row.ends and (is_later or self.row.guarantee not in ("finite", "hosts"))


def _out_of_memory(event: Mapping[str, Any]) -> bool:
    said = f"{event.get('reason')} {event.get('error')}"
    return any(words in said for words in NO_MEMORY)


def _no_snapshot(what: str) -> Row:
    return Row(
        "snapshots",
        f"The newest snapshot of group {{group}} {what}: {{cause}}. A loss of its host now goes back to {{coded}}; "
        "everstep snapshots RUN_DIR says what a start would restore.",
        ends=("snapshot_protected",),
        once=True,
    )


ROWS: dict[str, Row] = {
    "snapshot_failed": _no_snapshot("was not taken"),
    "snapshot_unprotected": _no_snapshot("is not coded"),
    "workers_unprotected": Row(
        "workers",
        "If {risk} now, the run ends: {cause}. Make room in hosts' memory or the run directory's storage.",
        ends=("workers_protected", *AWAY),
        who="{group}",
    ),
    "checkpoint_failed": Row(
        "checkpoint",
        "The checkpoint of step {step} was not written: {cause}. Training goes on; make room in {folder}, or mend its "
        "storage.",
        ends=("checkpoint_saved",),
    ),
    "left_out": Row(
        "reach",
        "Groups {names} are left out until that is mended: {apart}.",
        ends=("left_out", "commit"),
        when=lambda event: bool(event.get("groups")),
    ),
    "group_failing": Row(
        "group",
        "{Cause}; it starts again in {again_s:g} s. Its log: logs/group-{group}/rank-0.log.",
        ends=("commit", "agent_ended"),
        who="{group}",
    ),
    "workers_stalled": Row(
        "group",
        "Group {group} hung: rank {stalled_rank} made no progress in {phase} for {idle_s:.0f} s. It is killed and "
        "starts again; all ranks' stacks are in logs/group-{group}/.",
        ends=("commit", "agent_ended"),
        who="{group}",
    ),
    "straggler": Row(
        "pace",
        "Group {group} is slow: a slot takes it {pace:g} times as long as the fastest group, so it gets fewer. Look at "
        "its hosts for other load or a throttled device, or take them out of service.",
        ends=("straggler", *AWAY),
        who="{group}",
        when=lambda event: (event.get("pace") or 1.0) > 1.0,
    ),
    "agent_ended": Row(
        "group",
        "{Cause}. Groups that are left go on without it; its logs: logs/group-{group}.",
        ends=("commit",),
        who="{group}",
        when=lambda event: event.get("status") == "failed",
    ),
    "workers_died": Row(
        "machine",
        "Group {group} ran out of memory: {why}. It starts again; lower [training] local_batch_size, or set "
        '[activation_checkpoint] mode = "full".',
        ends=("commit", "agent_ended"),
        who="{group}",
        when=_out_of_memory,
    ),
    "resource_shortage": Row(
        "machine",
        "{Whole}; it is tried again in {again_s:g} s. Free memory, processes or disk there.",
        ends=("workers_started",),
        who="{group}",
        once=True,
    ),
    "lighthouse_died": Row(
        "lighthouse",
        "The lighthouse died ({exitcode}): no group can join or leave until it is back. It is started again; if this "
        "stays, see logs/lighthouse.log.",
        ends=("lighthouse_started",),
    ),
    "quorum_failed": Row(
        "lighthouse",
        "Group {group} got no quorum in {waited_s:.0f} s: {cause}. Check that the lighthouse's host can be reached, "
        "and that fault_tolerance.min_groups groups run.",
        ends=("commit", "quorum", "left", "training_done", *AWAY),
        who="quorum",
        when=lambda event: (event.get("waited_s") or 0.0) >= QUORUM_S,
        once=True,
    ),
    "unfit": Row("arithmetic", "{cause}.", who="{group}.{rank}"),  # which says what to do
    "slot_wrong": Row(
        "arithmetic",
        "Group {names} computed other bits of slot {slot} of step {step} than two others, whose bits the step has. If "
        "it comes again, take its host out of service.",
        who="{names}",
    ),
    "audit": Row(
        "arithmetic",
        "The parameters of groups {differ} are not those of the others at step {step}; they heal. If it comes again, "
        "take their hosts out of service.",
        ends=("audit",),
        who="audit",
        when=lambda event: event.get("agreed") is False,
    ),
    "not_finite": Row("finite", "Slot {slot} of step {step}: {cause}.", ends=("commit",), who="{step}.{slot}"),
    "diverged": Row(
        "finite",
        "Training diverged at step {step}: {diverged}. Lower [optimizer] lr or [training] max_norm, and go on from an "
        "older checkpoint ([checkpoint] load_step).",
        ends=("commit",),
        who="{step}",
    ),
    "poison_slot": Row(
        "data",
        "Slot {slot} of step {step} ended the workers of groups {names}: {error}. {then}.",
        who="{step}.{slot}",
    ),
    # What only several events together say: by the fields that `Troubles._added` adds, and what the account makes.
    "run_ended": Row("run", "The run failed: {cause}.{last_error}", when=lambda event: "last_error" in event),
    "data_ended": Row(
        "data",
        "The data ended at step {step} of {steps_asked}. Give more data, let the dataloader repeat it (infinite = "
        "true), or set [training] steps to what there is.",
        who="end",
    ),
    "snapshot_skipped": Row(
        "snapshots",
        "Group {group} has taken none of the last {skipped} snapshots: {cause}. A loss of hosts now goes back to the "
        "last coded one; set a larger [snapshot] interval.",
        ends=("snapshot_protected",),
        when=lambda event: event.get("skipped") == SKIPPED,
        once=True,
    ),
    "snapshot_protected": Row(
        "hosts",
        "The snapshot of step {step} survives the loss of no host; earlier ones survived {survived}. Bring back the "
        "groups that are gone: groups {sharers} share it.",
        ends=("snapshot_protected",),
        when=lambda event: not event["survives"] and event.get("survived", 0) > 0,
        once=True,
    ),
    "clocks": Row(
        "clock",
        "The clocks of groups {first} and {last} differ by {apart_s:.0f} s: training does not mind, but dates and "
        "times in the report are wrong. Set the clocks of their hosts (NTP).",
        ends=("clocks",),
        when=lambda event: (event.get("apart_s") or 0.0) > CLOCKS_S,
        once=True,
    ),
}  # fmt: skip
"""By kind of event."""


def trouble(event: Mapping[str, Any]) -> Trouble | None:
    """What one event says to be degraded from now on; None for other events, and for ranks that repeat it."""
    row = ROWS.get(event["kind"])
    if row is None or not row.when(event) or (event.get("rank") and event["kind"] not in EVERY_RANK):
        return None
    fields = _fields(event)
    return Trouble(row, row.who.format_map(fields), shown(row.sentence.format_map(fields))[:LONGEST], event)


def _fields(event: Mapping[str, Any]) -> Fields:
    """The fields of an event, and what sentences say of them."""
    cause = str(event.get("reason") or "for a reason that was not told").rstrip(". ")
    group, coded = event.get("group"), event.get("coded_step")
    whose = "" if group is None else f"group {group}: "
    skips = "It is skipped, so its tokens are not in the result"
    cuts = ", ".join(" and ".join(map(str, pair)) for pair in event.get("cut") or ())
    network = "Check the network between their hosts, and fault_tolerance.bind_host"
    stops = 'The run ends; look at its data, or set [fault_tolerance] on_poison = "skip"'
    said = {
        "cause": cause,
        "Cause": _capital(cause),
        "Whole": _capital(whose + cause),
        "why": event.get("error") or cause,
        "coded": "the last coded one" if coded is None else f"step {coded}",
        "names": ", ".join(map(str, event.get("groups") or ())),
        "differ": ", ".join(map(str, event.get("differing") or ())),
        "sharers": ", ".join(map(str, event.get("members") or ())),
        "apart": event.get("reason") or f"no connections between groups {cuts}. {network}",
        "diverged": f"the loss is {event['loss']}" if event.get("loss") is not None else cause,
        "then": skips if event.get("action") == "skip" else stops,
    }
    return Fields({name: value for name, value in {**event, **said}.items() if value is not None})


@dataclass
class Troubles:
    """Follows the events of a run, of all ranks."""

    now: dict[tuple[str, str], Trouble] = field(default_factory=dict)
    """By guarantee and who."""
    _death: Mapping[str, Any] = field(default_factory=dict)
    """The newest death of workers that had an error, in this start."""
    _skipped: Counter[int | None] = field(default_factory=Counter)
    """By group, snapshots that were due and not taken since one was coded."""
    _waited_s: defaultdict[int, float] = field(default_factory=lambda: defaultdict(float))
    """By group, for the quorum that it does not get."""
    _survived: int = 0
    """The most hosts that a snapshot of this start could lose."""

    def take(self, event: Mapping[str, Any]) -> list[str]:
        """Take note of one event, of any kind, or of what an account of the run makes of several; the sentences that
        are new with it."""
        told = dict(self.now)
        self.now = {key: one for key, one in told.items() if not one.is_ended_by(event)}
        if event["kind"] == "run_ended" and event.get("status") != "failed":
            lasting = ("data", "end") if event.get("status") == "done" else None
            self.now = {key: one for key, one in self.now.items() if key == lasting}
        found = trouble(event if event.get("rank") else {**event, **self._added(event)})
        if found is None:
            return []
        key = found.row.guarantee, found.who
        before = told.get(key)
        self.now.pop(key, None)
        self.now[key] = found
        while len(self.now) > MOST:
            del self.now[next(iter(self.now))]
        return [] if before is not None and (found.row.once or before.sentence == found.sentence) else [found.sentence]

    def _added(self, event: Mapping[str, Any]) -> dict[str, Any]:
        """What the troubles before an event add to what it says."""
        match event["kind"]:
            case "workers_died" if event.get("error"):
                self._death = event
            case "commit" if self._waited_s:
                for group in event["groups"]:
                    self._waited_s.pop(group, None)
            case "quorum_failed":
                self._waited_s[event["group"]] += event.get("waited_s") or 0.0
                return {"waited_s": self._waited_s[event["group"]]}
            case "quorum":
                self._waited_s.pop(event["group"], None)
            case "snapshot_skipped":
                self._skipped[event["group"]] += 1
                return {"skipped": self._skipped[event["group"]]}
            case "snapshot_protected":
                self._skipped.clear()
                self._survived = max(self._survived, event["survives"])
                return {"survived": self._survived}
            case "run_ended" if event["status"] == "failed":
                return {"last_error": self._last_error(event["reason"])}
        return {}

    def _last_error(self, reason: str) -> str:
        """What a sentence on the end of a run says of the newest error of a worker."""
        if not self._death:
            return ""
        rank = next(iter(self._death["exitcodes"]), "0")
        log = f"logs/group-{self._death['group']}/rank-{rank}.log"
        return (
            f" Its log: {log}." if self.error in reason else f" Last error of a worker: {self.error}; its log: {log}."
        )

    @property
    def error(self) -> str:
        """The newest exception of a worker in this start, its type and first line; "" for none."""
        return self._death.get("error", "")

    @property
    def sentences(self) -> list[str]:
        return [one.sentence for one in self.now.values()]


def shortage(run_dir: Path, why: str, again_s: float = 2.0) -> dict[str, Any]:
    """As the event of a run directory that takes no more events."""
    head = {"t": time.time(), "kind": "resource_shortage", "group": None, "rank": None, "step": None}
    return head | {"reason": f"{run_dir}: {why}", "again_s": again_s}


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
