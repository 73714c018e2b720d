"""What a run's attention checks cover, cost and leave unseen, and what became of slots that were refused again and
again: from events, for the report, `everstep status`, the view and the metrics."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

EVENTS = ("attention_schedule", "bound_suspect", "finding", "not_finite", "unfit")
"""Of attention checks; every rank has its own."""


def wrong(event: Mapping[str, Any]) -> str:
    """A `finding` event for people."""
    where = f"layer {event['layer']} {event['section']}, slot {event['slot']} of step {event['step']}"
    return f"group {event['group']} rank {event['rank']}: {where}: {event['anomaly']}, {event['action']}"


def covered(figures: Mapping[str, Any]) -> str:
    """What is checked, what that costs and leaves, of `Checking.figures`; empty where nothing is."""
    if figures["attention_coverage"] is None:
        return ""
    words = [f"{figures['attention_coverage']} parts checked"]
    if figures["attention_overhead"] is not None:
        words.append(f"{figures['attention_overhead']:.1%} of the time")
    if figures["attention_residual_risk"] is not None:
        words.append(f"{figures['attention_residual_risk']:.1g} harmful errors expected unseen in 10^6 steps")
    return ", ".join(words)


def judged(figures: Mapping[str, Any]) -> str:
    """What became of refusals, of `Checking.figures`; empty where there was nothing to judge."""
    counts = (
        ("ranks_unfit", "rank sent away as unfit", "ranks sent away as unfit"),
        ("bounds_widened", "bound widened", "bounds widened"),
        ("slots_not_finite", "slot let pass as not finite", "slots let pass as not finite"),
    )
    return ", ".join(
        f"{figures[name]} {one if figures[name] == 1 else many}" for name, one, many in counts if figures[name]
    )


@dataclass
class Checking:
    """Follows the events of a run, of all ranks."""

    findings: int = 0
    unfit: list[str] = field(default_factory=list)
    """Of each rank that was sent away: why."""
    doubts: dict[str, None] = field(default_factory=dict)
    """What became of refusals that were nobody's fault, each once."""
    widened: set[tuple[int, str]] = field(default_factory=set)
    """Layers and sections whose bounds were."""
    not_finite: set[tuple[int, int]] = field(default_factory=set)
    """Steps and slots that were let pass."""
    _plans: dict[tuple[int, int], Mapping[str, Any]] = field(default_factory=dict)
    """By group and rank: the newest `attention_schedule`."""

    def take(self, event: Mapping[str, Any]) -> None:
        """Take note of one event, of any kind and rank."""
        match event["kind"]:
            case "run_started":
                self._plans.clear()
            case "agent_ended" if event.get("status") == "failed":  # others go on without it
                others = {place: plan for place, plan in self._plans.items() if place[0] != event.get("group")}
                self._plans = others or self._plans
            case "attention_schedule":
                self._plans[event["group"], event.get("rank") or 0] = event
            case "finding":
                self.findings += 1
            case "unfit":
                self.unfit.append(event["reason"])
            case "bound_suspect":
                self.widened |= {(seen["layer"], seen["section"]) for seen in event["evidence"]}
                self.doubts[event["reason"]] = None
            case "not_finite":
                self.not_finite.add((event["step"], event["slot"]))
                self.doubts[event["reason"]] = None

    @property
    def coverage(self) -> str | None:
        """Parts of attention that are checked, of those there: "12 of 12"; None: no check, or nothing known yet."""
        return next((plan["coverage"] for plan in self._plans.values()), None)

    @property
    def overhead(self) -> float | None:
        """Time of the checks by that of the slots, of the rank for which it is the most; None: not measured."""
        return max(self._known("overhead"), default=None)

    @property
    def residual_risk(self) -> float | None:
        """Harmful errors expected to pass unseen in 10^6 steps, of all ranks together; None: not known."""
        known = self._known("residual_risk")
        return sum(known) if known else None

    def figures(self) -> dict[str, Any]:
        """Of report.json."""
        return {
            "ranks_unfit": len(self.unfit),
            "bounds_widened": len(self.widened),
            "slots_not_finite": len(self.not_finite),
            "attention_coverage": self.coverage,
            "attention_overhead": self.overhead,
            "attention_residual_risk": self.residual_risk,
        }

    def _known(self, name: str) -> list[float]:
        return [plan[name] for plan in self._plans.values() if plan.get(name) is not None]
