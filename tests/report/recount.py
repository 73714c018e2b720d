"""The main figures of a run computed a second time, in another way, to check the score against.

The score walks back from the newest commit and finds attempts by their times. Here every group's whole
history is carried forward through heals, checkpoints and restarts, and quorums tell the attempts apart, and how often
a group tried in one.
`python tests/report/recount.py RUN_DIR` compares both on a real run.
"""

import sys
from collections import Counter, defaultdict
from pathlib import Path

from everstep.report.score import score_events
from everstep.report.times import STATES
from everstep.run.events import read_events


def quorums(events):
    """(event, quorum) of each commit and attempt of rank 0: the step, its group's newest quorum id, which of the run's
    lighthouses gave it, each of which counts from 1, and for an attempt how many the group had made in this quorum."""
    newest, lighthouses, tries = {}, 0, Counter()
    for event in events:
        if event["kind"] == "lighthouse_started":
            lighthouses += 1
        elif event["kind"] == "quorum" and event["rank"] == 0:
            newest[event["group"]] = event["quorum_id"], lighthouses
        elif event["kind"] in ("commit", "attempt") and event["rank"] == 0:
            quorum_id, lighthouse = newest.get(event["group"], (None, 0))
            quorum = event["step"], event.get("quorum_id", quorum_id), lighthouse
            is_attempt = event["kind"] == "attempt"
            tries[event["group"], quorum] += is_attempt
            yield event, (*quorum, is_attempt and tries[event["group"], quorum])


def final_history(events):
    """Step -> quorum of the state that the last commit leads to."""
    holds, stored, last = defaultdict(dict), {"fresh": {}, "disk": {}, "memory": {}}, {}
    votes = {id(event): quorum for event, quorum in quorums(events)}
    for event in events:
        kind, group, step = event["kind"], event["group"], event["step"]
        if kind == "training_started" and event["rank"] == 0 and event["source"] != "peer":
            kept = stored[event["source"]]
            holds[group] = {s: quorum for s, quorum in kept.items() if s < step}
        elif kind == "heal" and event["rank"] == 0:
            holds[group] = dict(holds[event["source_group"]])
        elif kind == "checkpoint_saved" and event["rank"] == 0:
            stored["disk"] = dict(holds[group])
        elif kind == "commit" and event["rank"] == 0:
            holds[group][step] = votes[id(event)]
            last = stored["memory"] = dict(holds[group])
    return last


def recount(events):
    """The figures that `score_events` gives under the same names, and the loss by step."""
    commits, attempts = defaultdict(list), defaultdict(list)
    for event, quorum in quorums(events):
        (commits if event["kind"] == "commit" else attempts)[quorum].append(event)
    final = final_history(events)
    batch = next((event["global_batch_size"] for event in events if "global_batch_size" in event), 0)
    lost = repeated = 0.0
    for quorum in final.values():
        slots = list(zip(*(event["owners"] for event in commits[quorum]), strict=True))
        lost += sum(-1 in owners for owners in slots) * batch / len(slots)
        disputed = sum(len(set(owners) - {-1}) > 1 for owners in slots)
        whole = any(not e["coverage_ok"] and -1 not in e["owners"] for e in commits[quorum])
        repeated += (len(slots) if whole else disputed) * batch / len(slots)
    refused = {(event["group"], event["step"]) for event in events if event["kind"] == "slot_refused"}
    away = sum(
        any(event["recomputed"] and (event["group"], event["step"]) not in refused for event in members)
        for members in attempts.values()
    )
    again, seen = 0, set()
    for (step, *_), members in attempts.items():
        computed = [slot for event in members for slot in event["computed"]]
        again += len(computed) - (len(set(computed)) if step not in seen else 0)
        seen |= {step} if computed else set()
    figures = {
        "steps": len(final),
        "commits_dropped": len(commits) - len(final),
        "attempts": len(attempts),
        "attempts_thrown_away": away,
        "committed_ratio": len(final) / (len(final) + away) if final else None,
        "slots_recomputed": again,
        "samples_lost": round(lost),
        "samples_repeated": round(repeated),
        "kills": sum(event["kind"] == "fault" and event["fault"].startswith("kill") for event in events),
        "rejoin_s_max": max(rejoins(events), default=None),
        "time_by_group": time_split(events),
    }
    return figures, {step: commits[quorum][0]["loss"] for step, quorum in final.items()}


SPEAKS = ("worker_ready", "workers_started", "workers_died", "agent_died", "quorum", "quorum_failed",
          "waiting_for_state", "heal", "attempt", "commit", "left", "training_done", "agent_ended")  # fmt: skip


def time_split(events):
    """Group -> state -> seconds. The gap between two words of a group belongs to the states that the second tells."""
    starts = [event["t"] for event in events if event["kind"] == "run_started"][1:]
    whole = defaultdict(lambda: dict.fromkeys(STATES, 0.0))
    for low, high in zip([float("-inf"), *starts], [*starts, float("inf")], strict=True):
        session = [event for event in events if low <= event["t"] < high]
        ended = [event["t"] for event in session if event["kind"] == "run_ended"]
        end = ended[-1] if ended else session[-1]["t"]
        words = defaultdict(list)
        for event in session:
            if event["kind"] in SPEAKS and not event.get("rank") and event["t"] <= end:
                words[event["target_group"] if event["kind"] == "agent_died" else event["group"]].append(event)
        for group, said in words.items():
            at, up, over, away = session[0]["t"], False, False, "start-up"
            for event in said:
                gap, at = event["t"] - at, event["t"]
                for state, seconds in of_gap(event, gap, up, away).items():
                    whole[str(group)][state] += seconds
                if event["kind"] == "worker_ready":
                    up, over, away = True, False, "restarting"
                elif event["kind"] in ("workers_started", "workers_died", "agent_died"):
                    up = False
                elif event["kind"] in ("left", "training_done", "agent_ended"):
                    up, over = False, True
            if not up and not over:
                whole[str(group)][away] += end - at
    return whole


def of_gap(event, gap, up, away):
    """State -> seconds of the time before an event. `up`: whether the group had workers that train; `away`: what it
    does when it has none."""
    kind, usual = event["kind"], "productive" if up else away
    if kind in ("quorum", "heal"):
        spent = min(gap, event.get("wait_s" if kind == "quorum" else "took_s", 0.0))
        return {usual: gap - spent, "waiting" if kind == "quorum" else "healing": spent}
    if kind == "attempt" and event["committed"]:
        again = gap * len(event["recomputed"]) / max(1, len(event["computed"]))
        return {"recomputed": again, "productive": gap - again}
    if kind in ("workers_started", "workers_died", "agent_died"):
        return {"stalled" if up else away: gap}
    fixed = {"worker_ready": away, "quorum_failed": "waiting", "waiting_for_state": "waiting",
             "attempt": "stalled", "commit": "productive"}  # fmt: skip
    return {fixed.get(kind, usual): gap}


def rejoins(events):
    """Seconds from each kill to the group's next commit in which it took part, of those that came back."""
    away, started, back = defaultdict(list), set(), []
    for event in events:
        kind, group = event["kind"], event["group"]
        if kind == "fault" and event["fault"].startswith("kill"):
            target = event["target_group"]
            for hit in target if isinstance(target, list) else [target]:
                away[hit].append(event["t"])
                started.discard(hit)
        elif kind == "worker_ready" and event["rank"] == 0:
            started.add(group)
        elif kind == "commit" and event["rank"] == 0 and group in started:
            spare = len(event["groups"]) > len(event["owners"])
            if group in event["groups"] and (spare or group in event["owners"]):
                back += [event["t"] - t for t in away.pop(group, ())]
    return back


def differences(events):
    """Name -> (score's, recount's) of every figure on which they disagree."""
    theirs, their_losses = score_events(events)
    ours, our_losses = recount(events)
    pairs = {name: (theirs[name], ours[name]) for name in ours} | {"curve": (their_losses, our_losses)}
    return {name: pair for name, pair in pairs.items() if not same(*pair)}


def same(a, b):
    """Equal, but for the rounding of sums of seconds."""
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return a == b or (isinstance(a, float) and isinstance(b, float) and abs(a - b) < 1e-3)


if __name__ == "__main__":
    found = differences(list(read_events(Path(sys.argv[1]))))
    print("\n".join(f"{name}: score {a}, recount {b}" for name, (a, b) in found.items()) or "the same")
    sys.exit(bool(found))
