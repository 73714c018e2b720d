"""What a run's attention checks cover, cost and leave unseen, and what became of slots that were refused again and
again: from events, for the report, `everstep status`, the view and the metrics."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

ACTIONS = ("corrected", "recomputed", "refused")
"""What the attention check can do about what it finds."""


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
    if figures["attention_rate"] is not None:
        words.append(f"each layer in {figures['attention_rate']:.1%} of the slots")
    return ", ".join(words)


def judged(figures: Mapping[str, Any]) -> str:
    """What became of refusals, of `Checking.figures`; empty where there was nothing to judge."""
    counts = (
        ("ranks_unfit", "rank sent away as unfit", "ranks sent away as unfit"),
        ("slots_accepted", "slot accepted with findings", "slots accepted with findings"),
        ("slots_not_finite", "slot not finite on any group", "slots not finite on any group"),
    )
    return ", ".join(
        f"{figures[name]} {one if figures[name] == 1 else many}" for name, one, many in counts if figures[name]
    )


@dataclass
class Checking:
    """Follows the events of a run, of all ranks."""

    findings: Counter[str] = field(default_factory=Counter)
    """By action."""
    unfit: list[str] = field(default_factory=list)
    """Of each rank that was sent away: why."""
    accepted: set[tuple[int, int]] = field(default_factory=set)
    """Steps and slots that were computed with their findings."""
    not_finite: set[tuple[int, int]] = field(default_factory=set)
    """Steps and slots that no group could compute."""
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
                self.findings[event["action"]] += 1
            case "unfit":
                self.unfit.append(event["reason"])
            case "slot_accepted":
                self.accepted.add((event["step"], event["slot"]))
            case "not_finite":
                self.not_finite.add((event["step"], event["slot"]))

    @property
    def coverage(self) -> str | None:
        """Parts of attention that are checked, of those there: "12 of 12"; None: no check, or nothing known yet."""
        return next((plan["coverage"] for plan in self._plans.values()), None)

    @property
    def overhead(self) -> float | None:
        """Time of the checks by that of the slots, of the rank for which it is the most; None: not measured."""
        return max(self._known("overhead"), default=None)

    @property
    def rate(self) -> float | None:
        """Share of slots in which a layer is checked, of the rank for which it is the least; None: not known."""
        return min(self._known("rate"), default=None)

    def figures(self) -> dict[str, Any]:
        """Of report.json."""
        return {f"findings_{action}": self.findings[action] for action in ACTIONS} | {
            "ranks_unfit": len(self.unfit),
            "slots_accepted": len(self.accepted),
            "slots_not_finite": len(self.not_finite),
            "attention_coverage": self.coverage,
            "attention_overhead": self.overhead,
            "attention_rate": self.rate,
        }

    def _known(self, name: str) -> list[float]:
        return [plan[name] for plan in self._plans.values() if plan.get(name) is not None]
