"""What a run's attention checks cover, cost and leave unseen, and what became of slots that were refused again and
again: for the report, `everstep status` and the view."""

from collections.abc import Mapping
from typing import Any

from everstep.report.account import Account

ACTIONS = ("corrected", "recomputed", "refused")
"""What the attention check can do about what it finds."""


def checks(account: Account) -> dict[str, Any]:
    """Of report.json: what the checks found, what became of refusals, and what is checked: of the rank for which that
    costs the most, and of the one for which it leaves the most."""
    plans = [*account.current.schedules.values()]
    known = {name: [plan[name] for plan in plans if plan.get(name) is not None] for name in ("overhead", "rate")}
    return {f"findings_{action}": account.findings[action] for action in ACTIONS} | {
        "ranks_unfit": account.counts["unfit"],
        "slots_accepted": len(account.named["slot_accepted"]),
        "slots_not_finite": len(account.named["not_finite"]),
        "attention_coverage": plans[0]["coverage"] if plans else None,
        "attention_overhead": max(known["overhead"], default=None),
        "attention_rate": min(known["rate"], default=None),
    }


def covered(figures: Mapping[str, Any]) -> str:
    """What is checked, what that costs and leaves, of `checks`; empty where nothing is."""
    if figures["attention_coverage"] is None:
        return ""
    words = [f"{figures['attention_coverage']} parts checked"]
    if figures["attention_overhead"] is not None:
        words.append(f"{figures['attention_overhead']:.1%} of the time")
    if figures["attention_rate"] is not None:
        words.append(f"each layer in {figures['attention_rate']:.1%} of the slots")
    return ", ".join(words)


def judged(figures: Mapping[str, Any]) -> str:
    """What became of refusals, of `checks`; empty where there was nothing to judge."""
    counts = (
        ("ranks_unfit", "rank", "sent away as unfit"),
        ("slots_accepted", "slot", "accepted with findings"),
        ("slots_not_finite", "slot", "not finite on any group"),
    )
    return ", ".join(f"{counted(figures[name], noun)} {what}" for name, noun, what in counts if figures[name])


def counted(count: int, noun: str) -> str:
    """1 step, 2 steps."""
    return f"{count} {noun}{'' if count == 1 else 's'}"
