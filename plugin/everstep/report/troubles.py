"""Which guarantees of a run do not hold now: one sentence for each, with its cause and what to do.

The console, `everstep status`, the page, Prometheus and the webhook take the sentences from here. Most follow from one
event (`ROWS`). The others follow from several: clocks that differ, snapshots that are skipped again and again, hosts
that a snapshot no longer survives, data that ended.
"""

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from everstep.run.events import named, shown

GRACE_S = 5.0
"""Seconds after an announced retry by which its failure would have been reported."""
QUORUM_S = 5.0
"""Seconds without a quorum before that is a trouble. A death causes shorter waits."""
SKIPPED = 10
"""Number of due snapshots skipped in a row before that is a trouble."""
PACE_S = 60.0
"""Seconds without a change of a group's pace after which it is announced again that the group is slow. If steps are
short, a group may seem slow every second because of noise."""
CLOCKS_S = 60.0
"""Seconds by which the groups' dates of one commit may differ."""
LONGEST = 600
"""Largest number of characters in a sentence: a reason may quote a long message of another program."""
AWAY = ("workers_died", "workers_started", "agent_ended")
"""Kinds of events after which the processes of the group that reported a trouble are gone."""
NO_MEMORY = (
    "MemoryError", "out of memory", "control group was used", "can't allocate memory", "Cannot allocate memory",
    "bad_alloc",
)  # fmt: skip
"""Words by which Python, devices, the kernel, PyTorch's CPU allocator and C++ say that memory is used up."""
EVERY_RANK = frozenset(("unfit", "not_finite", "snapshot_failed"))
"""Kinds of events that each rank reports for itself. Of other kinds only rank 0's events count."""


class Fields(dict):
    """The fields of an event for `str.format_map`; a field that it lacks shows as "?"."""

    def __missing__(self, name: str) -> "Fields":
        return self

    def __format__(self, form: str) -> str:
        return "?"


@dataclass(frozen=True)
class Row:
    """How events of one kind become a trouble. `sentence` and `who` are formats of the event's fields and of those of
    `_fields`; events for which `when` is true begin it, and events of a kind in `ends` end it."""

    guarantee: str
    sentence: str
    ends: tuple[str, ...] = ()
    who: str = ""
    when: Callable[[Mapping[str, Any]], bool] = lambda event: True
    once: bool = False
    """Whether only its beginning is announced, and not each event that reports it again in other words."""


@dataclass(frozen=True)
class Trouble:
    """One guarantee that does not hold."""

    row: Row
    who: str
    """The group, or what else it concerns; "" for the whole run."""
    sentence: str
    event: Mapping[str, Any]
    """The newest event that reported it."""

    def is_ended_by(self, event: Mapping[str, Any]) -> bool:
        """Whether a later event ends it. A shortage ends as well if no new one came by GRACE_S after its retry."""
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
        f"The newest snapshot of group {{group}} {what}: {{cause}}. If its host is lost now, a recovery from memory "
        "goes back to {coded}. `everstep snapshots RUN_DIR` shows what a start would restore.",
        ends=("snapshot_protected",),
        once=True,
    )


ROWS: dict[str, Row] = {
    "snapshot_failed": _no_snapshot("was not taken"),
    "snapshot_unprotected": _no_snapshot("is not coded"),
    "workers_unprotected": Row(
        "workers",
        "If {risk} now, the run ends: {cause}. Make room in the hosts' memory, or on the run directory's storage.",
        ends=("workers_protected", *AWAY),
        who="{group}",
    ),
    "checkpoint_failed": Row(
        "checkpoint",
        "The checkpoint of step {step} is missing: {cause}. The run goes on and tries again later. Make room there, or "
        "repair the storage.",
        ends=("checkpoint_saved",),
    ),
    "left_out": Row(
        "reach",
        "The steps leave out {names} until this is fixed: {apart}.",
        ends=("left_out", "commit"),
        when=lambda event: bool(event.get("groups")),
    ),
    "group_failing": Row(
        "group",
        "{cause}. It restarts in {again_s:g} s. See logs/group-{group}/rank-0.log.",
        ends=("commit", "agent_ended"),
        who="{group}",
    ),
    "workers_stalled": Row(
        "group",
        "Group {group} hung: rank {stalled_rank} made no progress in {phase} for {idle_s:.0f} s. The group is "
        "killed and restarted. The stacks of all its ranks are in logs/group-{group}/.",
        ends=("commit", "agent_ended"),
        who="{group}",
    ),
    "straggler": Row(
        "pace",
        "Group {group} is slow: a slot takes it {pace:g} times as long as the fastest group, so it gets fewer slots. "
        "Look for other load or a throttled device on its hosts, or take them out of service.",
        ends=("straggler", *AWAY),
        who="{group}",
        when=lambda event: (event.get("pace") or 1.0) > 1.0,
    ),
    "agent_ended": Row(
        "group",
        "{cause}. Other groups, if any are left, go on without it. See logs/group-{group}/.",
        ends=("commit",),
        who="{group}",
        when=lambda event: event.get("status") == "failed",
    ),
    "workers_died": Row(
        "machine",
        "Group {group} ran out of memory: {why}. It restarts. Lower [training] local_batch_size, or set "
        '[activation_checkpoint] mode = "full".',
        ends=("commit", "agent_ended"),
        who="{group}",
        when=_out_of_memory,
    ),
    "resource_shortage": Row(
        "machine",
        "{whose}{cause}. This is retried in {again_s:g} s. Free what is short (memory, processes, descriptors, disk "
        "space), or repair the storage.",
        ends=("workers_started",),
        who="{group}",
        once=True,
    ),
    "lighthouse_died": Row(
        "lighthouse",
        "The lighthouse died (exit code {exitcode}): no group can join or leave until it is back. It is restarted. If "
        "it stays away, see logs/lighthouse.log.",
        ends=("lighthouse_started",),
    ),
    "quorum_failed": Row(
        "lighthouse",
        "Group {group} got no quorum in {waited_s:.0f} s: {cause}. Check that the lighthouse's host can be reached, "
        "and that at least fault_tolerance.min_groups groups run.",
        ends=("commit", "quorum", "left", "training_done", *AWAY),
        who="quorum",
        when=lambda event: (event.get("waited_s") or 0.0) >= QUORUM_S,
        once=True,
    ),
    "unfit": Row("arithmetic", "{cause}.", who="{group}.{rank}"),  # the reason says what to do
    "slot_wrong": Row(
        "arithmetic",
        "Slot {slot} of step {step}: {names} computed other bits than two other groups, whose bits the step has. If "
        "this happens again, take the host of {names} out of service.",
        who="{names}",
    ),
    "audit": Row(
        "arithmetic",
        "The parameters of {differ} differ from those of the other groups at step {step}. A group that differs "
        "restarts and heals. If this happens again, take its host out of service.",
        ends=("audit",),
        who="audit",
        when=lambda event: bool(event.get("differing")),
    ),
    "not_finite": Row("finite", "Slot {slot} of step {step}: {cause}.", ends=("commit",), who="{step}.{slot}"),
    "diverged": Row(
        "finite",
        "Training diverged at step {step}: {cause}. Begin another run from an older checkpoint ([checkpoint] "
        "initial_load_path) with a lower [optimizer] lr or [training] max_norm.",
        ends=("commit",),
        who="{step}",
    ),
    "poison_slot": Row(
        "data",
        "Slot {slot} of step {step} ended the workers of {names}: {error}. {then}.",
        who="{step}.{slot}",
    ),
    # These follow from several events: by fields that `Troubles._added` adds, or as events that the account makes.
    "run_ended": Row("run", "The run failed: {cause}.{last_error}", when=lambda event: "last_error" in event),
    "data_ended": Row(
        "data",
        "The data ended at step {step} of {steps_asked}. Provide more data, let the dataloader repeat it "
        "(infinite = true), or lower [training] steps.",
        who="end",
    ),
    "events_missing": Row(
        "data",
        "Events are missing in events/: groups finished, but only {step} of {steps_asked} steps are told of there. "
        "Copy all of events/, or expect gaps in the report.",
        who="end",
    ),
    "snapshot_skipped": Row(
        "snapshots",
        "Group {group} has taken none of the last {skipped} snapshots: {cause}. If hosts are lost now, a recovery from "
        "memory goes back to the last coded snapshot. Set a larger [snapshot] interval.",
        ends=("snapshot_protected",),
        when=lambda event: event.get("skipped") == SKIPPED,
        once=True,
    ),
    "snapshot_protected": Row(
        "hosts",
        "The snapshot of step {step} survives the loss of no host; earlier ones survived the loss of {survived}. It is "
        "shared by {sharers} only: bring back the groups that are gone, and kill a keeper that hangs.",
        ends=("snapshot_protected",),
        when=lambda event: not event["survives"] and event.get("survived", 0) > 0,
        once=True,
    ),
    "clocks": Row(
        "clock",
        "The clocks of groups {first} and {last} differ by {apart_s:.0f} s. Training is not affected, but times in "
        "the report are wrong. Synchronize the clocks of their hosts (NTP).",
        ends=("clocks",),
        when=lambda event: (event.get("apart_s") or 0.0) > CLOCKS_S,
        once=True,
    ),
}  # fmt: skip
"""Kind of event -> how it becomes a trouble."""
GUARANTEES = tuple(dict.fromkeys(row.guarantee for row in ROWS.values()))
"""The guarantees that may not hold; docs/monitoring.md says what each means."""


def trouble(event: Mapping[str, Any]) -> Trouble | None:
    """Return the trouble that an event begins; None for other events, and for ranks that repeat what rank 0 reports."""
    row = ROWS.get(event["kind"])
    if row is None or not row.when(event) or (event.get("rank") and event["kind"] not in EVERY_RANK):
        return None
    fields = _fields(event)
    return Trouble(row, row.who.format_map(fields), shown(row.sentence.format_map(fields))[:LONGEST], event)


def _fields(event: Mapping[str, Any]) -> Fields:
    """Return the fields of an event, and the phrases that sentences build from them."""
    cause = str(event.get("reason") or "no reason was given").rstrip(". ")
    group, coded = event.get("group"), event.get("coded_step")
    skips = "The slot is skipped, so its tokens are missing from the result"
    cuts = ", ".join(" and ".join(map(str, pair)) for pair in event.get("cut") or ())
    network = "Check the network between their hosts, and fault_tolerance.bind_host"
    skip = 'set [fault_tolerance] on_poison = "skip" (not with [semi_sync]) to leave it out'
    stops = f"The run ends. Check the data of this slot, or {skip}"
    said = {
        "cause": cause,
        "whose": "" if group is None else f"group {group}: ",
        "why": event.get("error") or cause,
        "coded": "the last coded snapshot" if coded is None else f"step {coded}",
        "names": named(event.get("groups") or ()),
        "differ": named(event.get("differing") or ()),
        "sharers": named(event.get("members") or ()),
        "apart": event.get("reason") or f"no connections between groups {cuts}. {network}",
        "then": skips if event.get("action") == "skip" else stops,
    }
    return Fields({name: value for name, value in {**event, **said}.items() if value is not None})


@dataclass
class Troubles:
    """Collects the troubles of a run that hold now, from the events of all ranks."""

    now: dict[tuple[str, str], Trouble] = field(default_factory=dict)
    """(guarantee, who) -> the trouble."""
    _death: Mapping[str, Any] = field(default_factory=dict)
    """The newest `workers_died` event with an error, in this start of the run."""
    _skipped: Counter[int | None] = field(default_factory=Counter)
    """Group id -> due snapshots that it skipped since one was coded."""
    _paced: dict[int | None, float] = field(default_factory=dict)
    """Group id -> time of the newest event that it has become slow, or is not slow any more."""
    _survived: int = 0
    """Largest number of hosts that any snapshot of this start could lose."""
    _asked: float = math.inf
    """Number of groups that `everstep scale` asked for last."""

    def take(self, event: Mapping[str, Any]) -> list[str]:
        """Process one event, or one that the account makes of several. Return the sentences that are new."""
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
        same = before is not None and (found.row.once or before.sentence == found.sentence)
        return [] if same or found.event.get("again") else [found.sentence]

    def _added(self, event: Mapping[str, Any]) -> dict[str, Any]:
        """Remember what later events need of this one. Return the fields that earlier events add to it."""
        match event["kind"]:
            case "workers_died" if event.get("error"):
                self._death = event
            case "scaled":
                self._asked = event["count"]
            case "straggler":
                before, self._paced[event["group"]] = self._paced.get(event["group"], -math.inf), event["t"]
                return {"again": event["t"] < before + PACE_S}
            case "snapshot_skipped":
                self._skipped[event["group"]] += 1
                return {"skipped": self._skipped[event["group"]]}
            case "snapshot_protected":
                self._skipped.clear()
                self._survived = max(self._survived, event["survives"])
                return {"survived": self._survived if len(event["members"]) < self._asked else 0}
            case "run_ended" if event["status"] == "failed":
                return {"last_error": self._last_error(event["reason"])}
        return {}

    def _last_error(self, reason: str) -> str:
        """Return what the sentence on a failed run says of the newest error of a worker."""
        if not self._death:
            return ""
        rank = next(iter(self._death["exitcodes"]), "0")
        log = f"logs/group-{self._death['group']}/rank-{rank}.log"
        return f" See {log}." if self.error in reason else f" Last error of a worker: {self.error}; its log: {log}."

    @property
    def error(self) -> str:
        """The newest exception of a worker in this start, its type and first line; "" for none."""
        return self._death.get("error", "")

    @property
    def sentences(self) -> list[str]:
        """One sentence for each trouble that holds now."""
        return [one.sentence for one in self.now.values()]


def shortage(run_dir: Path, why: str, again_s: float = 2.0) -> dict[str, Any]:
    """Return a `resource_shortage` event for a run directory in which no event can be written any more."""
    head = {"t": time.time(), "kind": "resource_shortage", "group": None, "rank": None, "step": None}
    return head | {"reason": f"{run_dir}: {why}", "again_s": again_s}
