"""A run's figures for Prometheus, computed from its events: docs/monitoring.md lists them."""

from collections.abc import Iterable
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

from everstep.report.checking import ACTIONS, EVENTS, Checking
from everstep.report.lineage import FirstMention
from everstep.report.protection import Protection
from everstep.report.times import Lane, group_of
from everstep.report.troubles import GUARANTEES, Troubles

COUNTED = (
    "workers_died", "workers_stalled", "group_failing", "heal", "heal_failed", "left_out", "lighthouse_started",
    "lighthouse_died", "node_bad", "poison_slot", "slot_skipped", "slot_refused", "slot_accepted", "not_finite",
    "unfit", "snapshot", "snapshot_failed", "snapshot_skipped", "snapshot_unprotected", "checkpoint_saved",
    "checkpoint_failed", "worker_moved", "workers_unprotected", "resource_shortage", "stranger_refused", "straggler",
    "fault",
)  # fmt: skip
"""Kinds of events that are counted as they come."""


class Metrics:
    """Follows the events of a run. `registry` is its own: nothing is shared with other users of the library.

    Attributes:
        troubles: what does not hold now.

    Read from the beginning of the log, so counters go on where they were when whoever follows is started again.
    """

    def __init__(self, groups: int, min_groups: int) -> None:
        self.registry = CollectorRegistry()
        gauge, counter = self._gauge, self._counter
        gauge("groups", "Nominal number of replica groups").set(groups)
        gauge("min_groups", "Groups without which the run waits").set(min_groups)
        self._step = gauge("committed_step", "Newest committed step")
        self._progress = gauge(
            "last_progress_timestamp_seconds", "When the newest step was committed, or this session began"
        )
        self._loss = gauge("loss", "Loss of the newest committed step")
        self._grad_norm = gauge("grad_norm", "Gradient norm of the newest committed step")
        self._taking_part = gauge("groups_taking_part", "Groups in the newest committed step")
        self._alive = gauge("groups_alive", "Groups whose workers run")
        self._given_up = gauge("groups_given_up", "Groups that are not started again")
        self._tokens = counter("tokens", "Valid tokens in committed steps")
        self._thrown_away = counter("attempts_thrown_away", "Attempts in which a slot was computed again that was held")
        self._seconds = counter("group_seconds", "What groups did with their time", "group", "state")
        self._events = counter("events", "Events by kind", "kind")
        self._findings = counter("findings", "What the attention check saw and did", "action")
        self._diverged = counter("replicas_diverged", "Audits that found a replica to differ")
        self._covered = gauge("attention_parts_checked", "Parts of a model's attention that are checked")
        self._overhead = gauge("attention_overhead", "Time of the attention check by that of the slots")
        self._rate = gauge("attention_rate", "Share of slots in which a layer is checked")
        self._protected = gauge("snapshot_protected_step", "Newest step whose snapshot is coded")
        self._age_steps = gauge("snapshot_age_steps", "Committed steps since the newest coded snapshot")
        self._survives = gauge("snapshot_survives_hosts", "Hosts that it may lose at once")
        self._degraded = gauge("degraded", "Troubles by the guarantee that does not hold", "guarantee")
        self._trouble = gauge("trouble_info", "What does not hold, in words", "guarantee", "sentence")
        for kind in COUNTED:  # from 0: the first of them is an increase
            self._events.labels(kind)
        for action in ACTIONS:
            self._findings.labels(action)
        for guarantee in GUARANTEES:
            self._degraded.labels(guarantee)
        self.troubles = Troubles()
        self._protection = Protection()
        self._checking = Checking()
        self._commits = FirstMention()
        self._rare = FirstMention()
        self._begin: float | None = None
        self._lanes: dict[int, Lane] = {}
        self._up: set[int] = set()
        self._down_for_good: set[int] = set()

    def _gauge(self, name: str, what: str, *labels: str) -> Gauge:
        return Gauge(f"everstep_{name}", what, labels, registry=self.registry)

    def _counter(self, name: str, what: str, *labels: str) -> Counter:
        return Counter(f"everstep_{name}", what, labels, registry=self.registry)

    def follow(self, events: Iterable[dict[str, Any]]) -> None:
        """Take note of new events."""
        for event in events:
            if self._begin is None or event["kind"] == "run_started":
                self._begin_session(event["t"])
            self.troubles.take(event)
            self._protection.take(event)
            self._checking.take(event)
            if event["kind"] in COUNTED:
                self._events.labels(event["kind"]).inc()
            if event.get("rank") in (None, 0) or event["kind"] in (*EVENTS, "audit"):
                self._take(event)
            if event.get("rank") in (None, 0):
                self._take_time(event, self._begin or 0.0)
        for guarantee in GUARANTEES:
            self._degraded.labels(guarantee).set(self.troubles.count(guarantee))
        self._trouble.clear()
        for found in self.troubles.now.values():
            self._trouble.labels(found.guarantee, found.sentence).set(1)
        self._protected.set(self._protection.step)
        self._age_steps.set(self._protection.age_steps)
        self._survives.set(self._protection.survives)
        self._covered.set(int((self._checking.coverage or "0").partition(" ")[0]))
        self._overhead.set(self._checking.overhead or 0.0)
        self._rate.set(self._checking.rate or 0.0)

    def _begin_session(self, t: float) -> None:
        self._begin = t
        self._progress.set(t)
        for known in (self._lanes, self._down_for_good, self._up):
            known.clear()

    def text(self) -> bytes:
        """As Prometheus reads it."""
        return generate_latest(self.registry)

    def _take(self, event: dict[str, Any]) -> None:
        match event["kind"]:
            case "commit" if self._commits.new(event["history"]):
                self._step.set(event["step"])
                self._progress.set(event["t"])
                self._loss.set(event["loss"])
                self._grad_norm.set(event.get("grad_norm") or 0.0)
                self._tokens.inc(event["tokens"])
                self._taking_part.set(len(event["groups"]))
            case "slot_refused":
                self._rare.new(("refused", event["group"], event["step"]))  # which drops what the group holds
            case "attempt" if event["recomputed"] and ("refused", event["group"], event["step"]) not in self._rare:
                if self._rare.new((event["step"], event.get("quorum_id"), event["attempt"])):
                    self._thrown_away.inc()
            case "finding":
                self._findings.labels(event["action"]).inc()
            case "audit" if not event["agreed"]:  # every group says so of each that differs
                self._diverged.inc(sum(self._rare.new(("audit", event["step"], one)) for one in event["differing"]))

    def _take_time(self, event: dict[str, Any], begin: float) -> None:
        group = group_of(event)
        if group is None:
            return
        lane = self._lanes.setdefault(group, Lane(begin))
        lane.take(event)
        for part in lane.stretches:
            self._seconds.labels(str(group), part.state).inc(part.end - part.begin)
        lane.stretches.clear()
        match event["kind"]:
            case "worker_ready":
                self._up.add(group)
                self._down_for_good.discard(group)
            case "workers_died" | "left" | "training_done" | "agent_ended":
                self._up.discard(group)
                if event.get("status") == "failed":
                    self._down_for_good.add(group)
        self._alive.set(len(self._up))
        self._given_up.set(len(self._down_for_good))
