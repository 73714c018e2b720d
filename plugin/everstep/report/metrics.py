"""A run's figures for Prometheus, computed from its events. docs/monitoring.md lists them."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from everstep.report.account import Account
from everstep.report.score import ACTIONS, checks
from everstep.report.troubles import GUARANTEES, ROWS
from everstep.run.event_fields import NEEDED


def prometheus_text(now: Account, min_groups: int, progress_t: float = 0.0) -> bytes:
    """Return the figures in Prometheus's text format. Counters do not fall back to 0 when the process that serves them
    is started again, as it reads the log from its beginning. `progress_t`: see `figures`."""
    registry: Any = SimpleNamespace(collect=lambda: figures(now, min_groups, progress_t))
    return generate_latest(registry)


def figures(now: Account, min_groups: int, progress_t: float = 0.0) -> Iterator[Metric]:
    """Yield the figures of a run, one metric family each. `progress_t`: wall time in seconds of the newest commit or of
    this session's start, as events do not follow a wall clock that is corrected during the run."""
    checked, protection = checks(now), now.protection
    newest, going = now.newest, now.current.groups.values()
    coverage = (checked["attention_coverage"] or "").partition(" ")[0]
    parts = int(coverage) if coverage.isdecimal() else 0
    for name, what, value in (
        ("groups", "Nominal number of replica groups", now.current.asked),
        ("min_groups", "Smallest number of groups with which the run goes on", min_groups),
        ("committed_step", "Newest committed step", newest.step if newest else 0),
        (
            "last_progress_timestamp_seconds",
            "Unix time of the newest commit, or of this session's start",
            progress_t,
        ),
        ("loss", "Loss of the newest committed step", newest.loss if newest else None),
        ("grad_norm", "Gradient norm of the newest committed step", newest.grad_norm if newest else None),
        ("groups_taking_part", "Groups in the newest committed step", len(now.taking_part)),
        ("groups_alive", "Groups whose workers run", sum(group.alive for group in going)),
        ("groups_given_up", "Groups that are not started again", sum(one.given_up is not None for one in going)),
        ("attention_parts_checked", "Parts of a model's attention that are checked", parts),
        ("attention_overhead", "Time of the attention check over that of the slots", checked["attention_overhead"]),
        ("attention_rate", "Share of slots in which a layer is checked", checked["attention_rate"]),
        ("snapshot_protected_step", "Newest step whose snapshot is coded", protection.step),
        ("snapshot_age_steps", "Committed steps since the newest coded snapshot", protection.age_steps),
        ("snapshot_survives_hosts", "Hosts that this snapshot survives the loss of at once", protection.survives),
    ):
        yield GaugeMetricFamily(f"everstep_{name}", what, value or 0.0)
    for name, what, value in (
        ("tokens", "Valid tokens in committed steps", now.lineage.tokens),
        ("attempts_thrown_away", "Attempts in which a group recomputed a slot it held", now.attempts.thrown_away),
        ("replicas_diverged", "Groups that audits found to differ, once per audit", len(now.distinct["audit"])),
    ):
        yield CounterMetricFamily(f"everstep_{name}", what, value)
    seconds = CounterMetricFamily("everstep_group_seconds", "Seconds by group and state", labels=("group", "state"))
    for group, spent in now.spent.items():
        for state, value in spent.items():
            seconds.add_metric((str(group), state), value)
    events = CounterMetricFamily("everstep_events", "Events by kind", labels=("kind",))
    for kind in sorted({*NEEDED, *ROWS}):  # listed at 0, so that the first one is an increase
        events.add_metric((kind,), now.counts[kind])
    findings = CounterMetricFamily("everstep_findings", "Findings of the attention check by action", labels=("action",))
    for action in ACTIONS:
        findings.add_metric((action,), checked[f"findings_{action}"])
    degraded = GaugeMetricFamily("everstep_degraded", "Current troubles by guarantee", labels=("guarantee",))
    for guarantee in GUARANTEES:
        degraded.add_metric((guarantee,), sum(key[0] == guarantee for key in now.troubles.now))
    told = GaugeMetricFamily("everstep_trouble_info", "A current trouble", labels=("guarantee", "sentence"))
    for (guarantee, _), found in now.troubles.now.items():
        told.add_metric((guarantee, found.sentence), 1.0)
    yield from (seconds, events, findings, degraded, told)
