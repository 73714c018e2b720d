"""A run's figures for Prometheus, computed from its events: docs/monitoring.md lists them."""

import signal
from collections.abc import Iterable
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge

from everstep.report.checking import EVENTS, Checking
from everstep.report.once import Commits
from everstep.report.protection import Protection
from everstep.report.score import ACTIONS
from everstep.report.times import Lane, group_of


class Metrics:
    """Follows the events of a run. `registry` is its own: nothing is shared with other users of the library.

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
        self._snapshot = gauge("snapshot_step", "Newest step with a snapshot in memory")
        self._snapshot_at = gauge("last_snapshot_timestamp_seconds", "When the newest snapshot was taken")
        self._checkpoint = gauge("checkpoint_step", "Newest checkpoint on disk")
        self._tokens = counter("tokens", "Valid tokens in committed steps")
        self._attempts = counter("attempts", "Attempts at a step, by group", "group", "committed")
        self._thrown_away = counter("attempts_thrown_away", "Attempts in which a slot was computed again that was held")
        self._seconds = counter("group_seconds", "What groups did with their time", "group", "state")
        self._deaths = counter("deaths", "Deaths of a group's workers", "group", "reason")
        self._heals = counter("heals", "States received from a living group", "group")
        self._heal_bytes = counter("heal_bytes", "Bytes received by healing")
        self._heal_s = counter("heal_seconds", "Time spent receiving states")
        self._payload = counter("bytes_across_groups", "Semi-synchronous: what one rank gave into sums", "group")
        self._kept = counter("worker_bytes_kept", "Semi-synchronous: states of workers written by one rank", "group")
        self._moved = counter("workers_moved", "Semi-synchronous: workers taken over from another group", "group")
        self._again = counter(
            "worker_rounds_again", "Semi-synchronous: rounds made again for a worker's state", "group"
        )
        self._refused = counter("slots_refused", "Slots computed again", "group")
        self._findings = counter("findings", "What the attention check saw and did", "action")
        self._unfit = counter("ranks_unfit", "Ranks that the attention check sent away")
        self._accepted = gauge("slots_accepted", "Slots computed with findings that several groups had")
        self._not_finite = counter("slots_not_finite", "Slots that are not finite on any group")
        self._covered = gauge("attention_parts_checked", "Parts of a model's attention that are checked")
        self._overhead = gauge("attention_overhead", "Time of the attention check by that of the slots")
        self._rate = gauge("attention_rate", "Share of slots in which a layer is checked")
        self._skipped = counter("snapshots_skipped", "Snapshots not taken", "group")
        self._protected = gauge("snapshot_protected_step", "Newest step whose snapshot is coded")
        self._age_steps = gauge("snapshot_age_steps", "Committed steps since the newest coded snapshot")
        self._survives = gauge("snapshot_survives_hosts", "Hosts that it may lose at once")
        self._protection = Protection()
        self._checking = Checking()
        self._lighthouse = counter("lighthouse_starts", "Starts of the lighthouse")
        self._diverged = counter("replicas_diverged", "Audits that found a replica to differ")
        self._bad_nodes = counter("bad_nodes", "Nodes that a group left")
        self._faults = counter("faults", "Injected faults", "fault")
        for action in ACTIONS:
            self._findings.labels(action)  # from 0: the first of them is an increase
        self._commits = Commits()
        self._begin: float | None = None
        self._trains = False
        self._lanes: dict[int, Lane] = {}
        self._up: set[int] = set()
        self._down_for_good: set[int] = set()
        self._stalled: set[int] = set()
        self._seen: set[tuple[Any, ...]] = set()

    def _gauge(self, name: str, what: str, *labels: str) -> Gauge:
        return Gauge(f"everstep_{name}", what, labels, registry=self.registry)

    def _counter(self, name: str, what: str, *labels: str) -> Counter:
        return Counter(f"everstep_{name}", what, labels, registry=self.registry)

    def follow(self, events: Iterable[dict[str, Any]]) -> None:
        """Take note of new events."""
        for event in events:
            if self._begin is None or event["kind"] == "run_started":
                self._begin = event["t"]
            self._protection.take(event)
            if event["kind"] in (*EVENTS, "audit"):  # every rank has its own
                self._take_check(event)
            elif event.get("rank") in (None, 0):
                self._take(event)
                self._take_time(event, self._begin)
        self._protected.set(self._protection.step)
        self._age_steps.set(self._protection.age_steps)
        self._survives.set(self._protection.survives)

    def _take(self, event: dict[str, Any]) -> None:
        group = str(event.get("group"))
        match event["kind"]:
            case "run_started":
                self._lanes.clear()
                self._down_for_good.clear()
                self._up.clear()
                self._progress.set(event["t"])
                self._trains = True
            case "worker_ready" if not self._trains:  # without a supervisor nobody says that the run begins
                self._progress.set(event["t"])
                self._trains = True
            case "commit":
                self._commit(event)
            case "attempt":
                self._attempts.labels(group, str(bool(event["committed"])).lower()).inc()
                dropped = ("refused", event["group"], event["step"]) in self._seen
                if (
                    event["recomputed"]
                    and not dropped
                    and self._first("attempt", event["step"], event.get("quorum_id"), event["attempt"])
                ):
                    self._thrown_away.inc()
            case "worker_moved":
                self._moved.labels(group).inc()
                self._again.labels(group).inc(event["rounds_again"])
            case "workers_stalled":
                self._stalled.add(event["group"])
            case "workers_died":
                self._deaths.labels(group, self._reason(event)).inc()
            case "heal":
                self._heals.labels(group).inc()
                self._heal_bytes.inc(event["bytes"])
                self._heal_s.inc(event["took_s"])
            case "slot_refused":
                self._refused.labels(group).inc()
                self._first("refused", event["group"], event["step"])  # which drops what the group holds
            case "snapshot":
                self._snapshot.set(event["step"])
                self._snapshot_at.set(event["t"])
            case "snapshot_skipped" | "snapshot_failed":
                self._skipped.labels(group).inc()
            case "checkpoint_saved":
                self._checkpoint.set(event["step"])
            case "lighthouse_started":
                self._lighthouse.inc()
            case "node_bad":
                self._bad_nodes.inc()
            case "fault":
                self._faults.labels(event["fault"]).inc()

    def _take_check(self, event: dict[str, Any]) -> None:
        if event["kind"] != "audit":
            self._take_attention(event)
        elif not event["agreed"]:
            # Every group says of every one that differs.
            new = [group for group in event["differing"] if self._first("audit", event["step"], group)]
            self._diverged.inc(len(new))

    def _take_attention(self, event: dict[str, Any]) -> None:
        checking = self._checking
        checking.take(event)
        match event["kind"]:
            case "finding":
                self._findings.labels(event["action"]).inc()
            case "unfit":
                self._unfit.inc()
            case "slot_accepted":
                self._accepted.set(len(checking.accepted))
            case "not_finite" if self._first("not_finite", event["step"], event["slot"]):
                self._not_finite.inc()
            case "attention_schedule":
                self._covered.set(int((checking.coverage or "0").partition(" ")[0]))
                self._overhead.set(checking.overhead or 0.0)
                self._rate.set(checking.rate or 0.0)

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
            case "workers_died" | "agent_died" | "left" | "training_done":
                self._up.discard(group)
            case "agent_ended":
                self._up.discard(group)
                if event["status"] == "failed":
                    self._down_for_good.add(group)
        self._alive.set(len(self._up))
        self._given_up.set(len(self._down_for_good))

    def _commit(self, event: dict[str, Any]) -> None:
        group = str(event["group"])
        if event.get("payload_bytes") is not None:
            self._payload.labels(group).inc(event["payload_bytes"])
        if event.get("kept_bytes") is not None:
            self._kept.labels(group).inc(event["kept_bytes"])
        if not self._commits.new(event):
            return
        self._step.set(event["step"])
        self._progress.set(event["t"])
        self._loss.set(event["loss"])
        if event.get("grad_norm") is not None:
            self._grad_norm.set(event["grad_norm"])
        self._tokens.inc(event["tokens"])
        self._taking_part.set(len(event["groups"]))

    def _first(self, *what: Any) -> bool:
        """Whether this has not been counted yet, of the rare things that several groups tell of."""
        new = what not in self._seen
        self._seen.add(what)
        return new

    def _reason(self, event: dict[str, Any]) -> str:
        """One of few: a signal, an exit status, or that it hung."""
        if event["group"] in self._stalled:
            self._stalled.discard(event["group"])
            return "stalled"
        code = next(iter(event["exitcodes"].values()), 0)
        if code >= 0:
            return f"status {code}"
        try:
            return signal.Signals(-code).name
        except ValueError:
            return f"signal {-code}"
