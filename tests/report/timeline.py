"""Event sequences written by hand: what a run with a known story would have logged."""

import json
from collections import Counter
from pathlib import Path

from everstep.report.page import write_report


def page_of(run_dir, against=None):
    write_report(run_dir, against)
    return run_dir / "report.html"


class Timeline:
    """Collects events; `events` returns them in order of time. A step has four slots unless `owners` differ."""

    def __init__(self):
        self.logged = []
        self.lives = Counter()
        self.held = {}
        """Group id -> history of its state."""
        self.newest = {}
        """Step -> history of its last new commit."""

    @property
    def events(self):
        return sorted(self.logged, key=lambda event: event["t"])

    def add(self, t, kind, group=None, step=None, role="worker", rank=0, **fields):
        rank = rank if role == "worker" else None
        head = {"t": t, "mono": t - 1000.0, "role": role, "group": group, "rank": rank, "step": step}
        self.logged.append(head | {"kind": kind} | fields)
        return self

    def start(self, t, *groups, step=1, source="fresh", history=None):
        for group in groups:
            self.lives[group] += 1
            self.held[group] = history or self.newest.get(step - 1, f"before-{step}")
            self.add(t, "worker_ready", group, incarnation=0, pid=1, startup_s=1.0)
            self.add(t, "training_started", group, step, source=source, slots=4, history=self.held[group])
        return self

    def commit(self, t, step, groups, by=None, owners=None, loss=None, took_s=1.0, coverage_ok=True, parent=None):
        """Add the `commit` events of one vote, one of each group of `by` (default: all), built on `parent`."""
        by = by if by is not None else groups
        parent = parent or self.held.get(by[0], f"before-{step}")
        history = f"{step} {loss} {groups} {[self.lives[group] for group in groups]} on {hash(parent):x}"
        self.newest[step] = history
        owners = owners if owners is not None else [groups[slot % len(groups)] for slot in range(4)]
        for group in by:
            self.held[group] = history
            self.add(
                t, "commit", group, step, owners=owners, groups=list(groups),
                loss=float(step) if loss is None else loss, took_s=took_s, coverage_ok=coverage_ok,
                tokens=100.0, grad_norm=1.0, history=history, parent=parent,
            )  # fmt: skip
        return self

    def attempt(self, t, step, group, computed=(), recomputed=(), took_s=1.0, committed=True):
        return self.add(
            t, "attempt", group, step, committed=committed, attempt=1, computed=list(computed),
            recomputed=list(recomputed), took_s=took_s,
        )  # fmt: skip

    def heal(self, t, group, source, step=None, history=None):
        self.held[group] = history or self.held.get(source, "before")
        return self.add(t, "heal", group, step, source_groups=[source], history=self.held[group], bytes=1, took_s=0.1)

    def fault(self, t, fault, target):
        return self.add(t, "fault", role="chaos", fault=fault, target_group=target, pids=[1])

    def write(self, run_dir: Path):
        """Write the events as a run would, one file per role, group and rank."""
        folder = run_dir / "events"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "lighthouse.jsonl").touch()
        for event in self.events:
            names = {"worker": f"group-{event['group']}.rank-{event['rank']}", "agent": f"agent-{event['group']}"}
            with (folder / f"{names.get(event['role'], event['role'])}.jsonl").open("a") as file:
                file.write(json.dumps(event, separators=(",", ":")) + "\n")
        return run_dir


def finished_run(loss_shift=0.0):
    """Return the log of three groups and eight steps. Group 2 is killed in step 4 and takes part again in step 7."""
    run = Timeline().add(0, "run_started", role="supervisor", groups=3, steps=8, seed=0, global_batch_size=24)
    run.start(1, 0, 1, 2)
    owners, all_groups = [0, 1, 2, 0, 1, 2], [0, 1, 2]
    for step in (1, 2, 3):
        run.commit(step + 1, step, all_groups, owners=owners, loss=5 - step * 0.1 + loss_shift)
        for group in all_groups:
            run.attempt(step + 1, step, group, [group, group + 3], took_s=0.9)
    run.fault(4.4, "kill-worker", 2)
    run.add(4.5, "workers_died", 2, role="agent", incarnation=0, exitcodes={"0": -9})
    for group in (0, 1):
        run.attempt(5.2, 4, group, [group, group + 3], took_s=1.1, committed=False)
        run.attempt(6, 4, group, [2 + 3 * group], took_s=0.7)
    run.commit(6, 4, [0, 1], owners=[0, 1, 0, 0, 1, 1], loss=4.6 + loss_shift, took_s=2.0)
    run.add(6.2, "worker_ready", 2, incarnation=1, pid=2, startup_s=1.0)
    for step, groups in ((5, [0, 1]), (6, [0, 1]), (7, all_groups), (8, all_groups)):
        if step == 7:
            run.heal(8.5, 2, source=0, step=7)
        run.commit(step + 2, step, groups, owners=[groups[i % len(groups)] for i in range(6)], loss=5 - step * 0.1)
        for group in groups:
            slots = [i for i in range(6) if groups[i % len(groups)] == group]
            run.attempt(step + 2, step, group, slots, took_s=0.9)
    for group in all_groups:
        run.add(10.5, "training_done", group, 8)
    return run.add(11, "run_ended", role="supervisor", status="done", reason="")
