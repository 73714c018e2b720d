"""A run's figures for Prometheus, computed from its events."""

from collections.abc import Iterable
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge


class Metrics:
    """Follows the events of a run. `registry` is its own: nothing is shared with other users of the library."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self._step = Gauge("everstep_committed_step", "Newest committed step", registry=registry)
        self._committed_at = Gauge(
            "everstep_last_commit_timestamp_seconds", "When the newest step was committed", registry=registry
        )
        self._loss = Gauge("everstep_loss", "Loss of the newest committed step", registry=registry)
        self._grad_norm = Gauge("everstep_grad_norm", "Gradient norm of the newest committed step", registry=registry)
        self._tokens = Counter("everstep_tokens", "Valid tokens in committed steps", registry=registry)
        self._groups = Gauge("everstep_groups", "Nominal number of replica groups", registry=registry)
        self._min_groups = Gauge("everstep_min_groups", "Groups without which the run waits", registry=registry)
        self._taking_part = Gauge("everstep_groups_taking_part", "Groups in the newest step", registry=registry)
        self._given_up = Gauge("everstep_groups_given_up", "Groups that are not started again", registry=registry)
        self._attempts = Counter(
            "everstep_attempts", "Attempts at a step, by group", ["group", "committed"], registry=registry
        )
        self._deaths = Counter("everstep_deaths", "Deaths of a group's workers", ["group"], registry=registry)
        self._heals = Counter("everstep_heals", "States received from a living group", ["group"], registry=registry)
        self._heal_bytes = Counter("everstep_heal_bytes", "Bytes received by healing", registry=registry)
        self._heal_s = Counter("everstep_heal_seconds", "Time spent receiving states", registry=registry)
        self._wait_s = Counter("everstep_quorum_wait_seconds", "Time waited for quorums", ["group"], registry=registry)
        self._refused = Counter("everstep_slots_refused", "Slots computed again", ["group"], registry=registry)
        self._findings = Counter(
            "everstep_findings", "What the attention check saw and did", ["action"], registry=registry
        )
        self._snapshot = Gauge("everstep_snapshot_step", "Newest step with a snapshot in memory", registry=registry)
        self._skipped = Counter("everstep_snapshots_skipped", "Snapshots not taken", ["group"], registry=registry)
        self._checkpoint = Gauge("everstep_checkpoint_step", "Newest checkpoint on disk", registry=registry)
        self._lighthouse = Counter("everstep_lighthouse_starts", "Starts of the lighthouse", registry=registry)
        self._diverged = Counter(
            "everstep_replicas_diverged", "Audits that found a replica to differ", registry=registry
        )
        self._bad_nodes = Counter("everstep_bad_nodes", "Nodes that a group left", registry=registry)
        self._faults = Counter("everstep_faults", "Injected faults", ["fault"], registry=registry)
        self._newest = 0

    def follow(self, events: Iterable[dict[str, Any]]) -> None:
        """Take note of new events."""
        for event in events:
            if event.get("rank") in (None, 0):
                self._take(event)

    def _take(self, event: dict[str, Any]) -> None:
        group = str(event.get("group"))
        match event["kind"]:
            case "run_started":
                self._groups.set(event["groups"])
                self._min_groups.set(event.get("min_groups", 1))
                self._given_up.set(0)
            case "commit":
                self._commit(event)
            case "attempt":
                self._attempts.labels(group, str(bool(event["committed"])).lower()).inc()
            case "quorum":
                self._wait_s.labels(group).inc(event["wait_s"])
            case "workers_died":
                self._deaths.labels(group).inc()
            case "heal":
                self._heals.labels(group).inc()
                self._heal_bytes.inc(event["bytes"])
                self._heal_s.inc(event["took_s"])
            case "slot_refused":
                self._refused.labels(group).inc()
            case "finding":
                self._findings.labels(event["action"]).inc()
            case "snapshot":
                self._snapshot.set(event["step"])
            case "snapshot_skipped" | "snapshot_failed":
                self._skipped.labels(group).inc()
            case "checkpoint_saved":
                self._checkpoint.set(event["step"])
            case "lighthouse_started":
                self._lighthouse.inc()
            case "audit" if not event["agreed"]:
                self._diverged.inc()
            case "node_bad":
                self._bad_nodes.inc()
            case "agent_ended" if event["status"] == "failed":
                self._given_up.inc()
            case "fault":
                self._faults.labels(event["fault"]).inc()

    def _commit(self, event: dict[str, Any]) -> None:
        if event["step"] == self._newest:
            return  # every group says it
        self._newest = event["step"]
        self._step.set(event["step"])
        self._committed_at.set(event["t"])
        self._loss.set(event["loss"])
        self._grad_norm.set(event.get("grad_norm", float("nan")))
        self._tokens.inc(event["tokens"])
        self._taking_part.set(len(event["groups"]))
