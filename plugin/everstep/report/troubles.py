"""Which guarantees of a run are degraded now: for each one sentence with its cause, and what to do.

The console, `everstep status`, the page and Prometheus take them from here.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

GUARANTEES = ("snapshots", "workers", "reach", "group", "lighthouse", "machine", "arithmetic", "finite")
"""What may be degraded; docs/monitoring.md says what each means."""


@dataclass(frozen=True)
class Trouble:
    """One guarantee that does not hold. `who`: the group, or what else it is of; "" for the whole run."""

    guarantee: str
    who: str
    sentence: str


def trouble(event: Mapping[str, Any]) -> Trouble | None:
    """What an event says to be degraded from now on; None for other events, and for ranks that repeat it."""
    group, reason = event.get("group"), str(event.get("reason", "")).rstrip(".")
    if event.get("rank") and event["kind"] not in ("unfit", "not_finite"):
        return None
    match event["kind"]:
        case "snapshot_unprotected" | "snapshot_failed":
            coded = f"step {event['coded_step']}" if event.get("coded_step") is not None else "the last coded one"
            return Trouble(
                "snapshots",
                "",
                f"The newest snapshot of group {group} is not coded: {reason}. "
                f"A loss of its host now goes back to {coded}; everstep snapshots RUN_DIR shows who holds what.",
            )
        case "workers_unprotected":
            return Trouble(
                "workers",
                str(group),
                f"If group {group} dies now, the run ends: {reason}. "
                "Make room in the run directory's storage, or mend it.",
            )
        case "left_out" if event["groups"]:
            names = ", ".join(map(str, event["groups"]))
            cut = ", ".join(f"{one} and {other}" for one, other in event["cut"])
            return Trouble(
                "reach",
                "",
                f"Groups {names} are left out until they reach the others again: no connections between groups {cut}. "
                "Check the network between their hosts, and fault_tolerance.bind_host.",
            )
        case "group_failing":
            again = f"it starts again in {event.get('again_s', 0.0):.0f} s"
            return Trouble("group", str(group), f"{_capital(reason)}; {again}. Its log: logs/group-{group}/rank-0.log.")
        case "agent_ended" if event.get("status") == "failed":
            return Trouble(
                "group", str(group), f"{_capital(reason)}. The others go on without it; its logs: logs/group-{group}."
            )
        case "lighthouse_died":
            return Trouble(
                "lighthouse",
                "",
                f"The lighthouse died ({event.get('exitcode')}): no group can join or leave until it is back. "
                "It is started again; if this stays, see logs/lighthouse.log.",
            )
        case "resource_shortage":
            whose = "" if group is None else f"group {group}: "
            again = f"it is tried again in {event['again_s']:.0f} s"
            return Trouble(
                "machine", str(group), f"{_capital(whose + reason)}; {again}. Free memory, processes or disk there."
            )
        case "unfit":
            return Trouble("arithmetic", f"{group}.{event.get('rank')}", f"{reason}.")  # which says what to do
        case "slot_wrong":
            names = ", ".join(map(str, event["groups"]))
            return Trouble(
                "arithmetic",
                names,
                f"Group {names} computed other bits of slot {event['slot']} of step {event['step']} than two others, "
                "whose bits the step has. If it comes again, take its host out of service.",
            )
        case "not_finite":
            return Trouble(
                "finite",
                f"{event['step']}.{event['slot']}",
                f"Slot {event['slot']} of step {event['step']}: {reason}.",
            )
    return None


@dataclass
class Troubles:
    """Follows the events of a run, of all ranks."""

    now: dict[tuple[str, str], str] = field(default_factory=dict)
    """By guarantee and who: the sentence."""

    def take(self, event: Mapping[str, Any]) -> None:
        """Take note of one event, of any kind."""
        group = str(event.get("group"))
        match event["kind"]:
            case "run_started":
                self.now.clear()
            case "run_ended" if event.get("status") != "failed":
                self.now.clear()
            case "snapshot_protected":
                self.now.pop(("snapshots", ""), None)
            case "workers_protected":
                self.now.pop(("workers", group), None)
            case "left_out":
                self.now.pop(("reach", ""), None)
            case "lighthouse_started":
                self.now.pop(("lighthouse", ""), None)
                self.now.pop(("machine", "None"), None)
            case "workers_started":
                self.now.pop(("machine", group), None)
            case "commit":
                self.now.pop(("group", group), None)
                for key in [
                    key for key in self.now if key[0] == "finite" and int(key[1].split(".")[0]) < event["step"]
                ]:
                    del self.now[key]
        if (found := trouble(event)) is not None:
            self.now[found.guarantee, found.who] = found.sentence

    def count(self, guarantee: str) -> int:
        """How many troubles of that guarantee there are."""
        return sum(1 for key in self.now if key[0] == guarantee)

    @property
    def sentences(self) -> list[str]:
        return list(self.now.values())


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
