"""The score of a run: every figure of report.json, computed from its events.

docs/report.md defines each field. A run that is still going can be scored too.
"""

import gc
import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from everstep.report.attempts import collect_attempts, slots_recomputed, thrown_away
from everstep.report.checking import ACTIONS, Checking, covered, judged
from everstep.report.faults import UNPROVOKED, collect_faults, cost_of_faults, fault_rows, normal_step_s
from everstep.report.lineage import Commit, trace
from everstep.report.productivity import productivity
from everstep.report.protection import Protection
from everstep.report.sessions import collect_sessions, commits_by_session, ending, groups_mean, stated
from everstep.report.times import Stretch, split, stretches
from everstep.run.events import read_events

READ = frozenset((
    "run_started", "run_ended", "fault", "agent_ended", "training_started", "training_done",
    "workers_started", "workers_died", "workers_stalled", "worker_ready", "worker_up", "group_failing", "left",
    "quorum", "quorum_failed", "waiting_for_state", "heal", "attempt", "commit", "validation", "audit",
    "slot_skipped", "slot_refused", "slot_accepted", "slot_wrong", "not_finite", "unfit", "finding",
    "attention_schedule", "keeper_found", "snapshot_protected", "snapshot_unprotected", "snapshot_failed", "left_out",
    "workers_unprotected", "workers_protected", "lighthouse_died", "lighthouse_started", "resource_shortage",
    "snapshot_skipped", "checkpoint_failed", "checkpoint_saved", "poison_slot", "diverged",
    "straggler",
))  # fmt: skip
"""The kinds of events that are read."""
FREQUENT = frozenset(("commit", "attempt", "quorum"))
"""What nearly all events of a long run are; the others are looked through again and again."""
UNREAD = frozenset(("mono", "role", "held_before", "slots", "inner_losses", "checksum"))
"""Fields that nothing here uses: a long run has millions of events."""

GOODPUT_DEFINITION = "time in steps of the final state, of all time that the groups had (Google's)"

LOSS_TOLERANCE = 1e-4
"""Largest difference of a loss to the other run's that `verdict` accepts: sums in another order stay far
below it, a missing or repeated batch does not."""


def load_events(run_dir: Path) -> list[dict[str, Any]]:
    """The events of a run that are read here, in order of time, reduced to the fields that are used.

    Raises FileNotFoundError when `run_dir` has no event log.
    """
    if not (Path(run_dir) / "events").is_dir():
        raise FileNotFoundError(f"{run_dir} has no events/ folder; give the directory of a run")
    return [reduced(event) for event in read_events(run_dir, READ)]


def reduced(event: dict[str, Any]) -> dict[str, Any]:
    """An event without the fields that are not read."""
    return {name: value for name, value in event.items() if name not in UNREAD}


@contextmanager
def uncollected() -> Iterator[None]:
    """Without garbage collection, which would search millions of events again and again for cycles that they
    cannot have, and double the time that a long run's score takes."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def score(run_dir: Path, against: Path | None = None) -> dict[str, Any]:
    """report.json of a run, one flat object. Figures that the events cannot tell are None.

    against: the directory of another run of the same config, to compare the losses with. Raises
    FileNotFoundError when a directory holds no event log.
    """
    found = measure(load_events(run_dir))
    return found.figures | loss_delta(found.losses, curve(against) if against is not None else {})


@dataclass(frozen=True)
class Measured:
    """All that the events of a run tell."""

    events: list[dict[str, Any]]
    figures: dict[str, Any]
    """Without the comparison of losses."""
    rows: list[dict[str, Any]]
    """`fault_rows`."""
    final: list[Commit]
    stretches: dict[int, list[Stretch]]
    losses: dict[int, float]
    validations: dict[int, float]
    """Validation loss by step; of a step that was made again, what came out last."""
    checking: Checking


def measure(events: list[dict[str, Any]]) -> Measured:
    """Everything at once, of what `load_events` gives."""
    with uncollected():
        return _measure(events)


def curve(run_dir: Path) -> dict[int, float]:
    """Loss by step along the commits that the final state contains."""
    with uncollected():
        return loss_by_step(trace(load_events(run_dir)).final)


def _measure(events: list[dict[str, Any]]) -> Measured:
    history = trace(events)
    attempts = collect_attempts(events)
    rare = [event for event in events if event["kind"] not in FREQUENT]
    faults = collect_faults(rare)
    runs = collect_sessions(events)
    by_session = commits_by_session(runs, history.commits)
    groups = stated(rare, "groups", "run_started")
    tries = Counter(attempt.step for attempt in attempts)
    disturbed = {step for step, count in tries.items() if count > 1}
    heals = {event["step"] for event in events if event["kind"] == "heal"}
    disturbed |= heals | {step + 1 for step in heals}  # in which who healed computes for the first time
    step_s = normal_step_s(history.commits, faults, disturbed, groups)
    rows = fault_rows(events, faults, runs, by_session, step_s)

    final = history.final
    skipped = skipped_slots(rare)
    lanes = stretches(events, runs)
    steps = {commit.step for commit in final}
    away = thrown_away(attempts)
    training_s = sum(run.training_s for run in runs)
    checking = Checking()
    for event in events:
        checking.take(event)
    batch = stated(rare, "global_batch_size", "run_started", "training_started")
    figures = {
        **ending(rare),
        "wall_s": sum(run.end - run.begin for run in runs),
        "training_s": training_s,
        "sessions": len(runs),
        "groups": groups,
        "groups_mean": groups_mean(by_session),
        "steps_asked": stated(rare, "steps", "run_started"),
        "steps": len(steps),
        "first_step": min(steps, default=None),
        "last_step": max(steps, default=None),
        "steps_unseen": max(steps) - min(steps) + 1 - len(steps) if steps else 0,
        "commits_dropped": len(history.commits) - len(final),
        "attempts": len(attempts),
        "attempts_thrown_away": away,
        "committed_ratio": len(steps) / (len(steps) + away) if steps else None,
        "slots_recomputed": slots_recomputed(attempts),
        "slots_skipped": sum(len(skipped.get(commit.step, ())) for commit in final),
        "samples": samples(((c, trained(c) - skipped.get(c.step, set())) for c in final), batch),
        "samples_lost": samples(((c, c.lost | skipped.get(c.step, set())) for c in final), batch),
        "samples_repeated": samples(((commit, commit.repeated) for commit in final), batch),
        "kills": sum(1 for fault in faults if fault.kills and fault.name != UNPROVOKED),
        "deaths_unprovoked": sum(1 for fault in faults if fault.name == UNPROVOKED),
        "faults": dict(Counter(fault.name for fault in faults)),
        "step_s_median": step_s,
        **cost_of_faults(rows, faults),
        **productivity(final, len(history.commits) - len(final), runs, lanes, step_s, groups),
        "goodput_definition": GOODPUT_DEFINITION,
        **tokens_of(final, training_s),
        **failures(rare),
        **split(lanes),
        "replicas_diverged": replicas_diverged(rare),
        **checking.figures(),
        "snapshots": protection_of(events),
        **exchanged(events),
    }
    validations = {event["step"]: event["loss"] for event in events if event["kind"] == "validation"}
    return Measured(events, figures, rows, final, lanes, loss_by_step(final), validations, checking)


def skipped_slots(events: Iterable[dict[str, Any]]) -> dict[int, set[int]]:
    """By step, the slots that were left out as poison (`fault_tolerance.on_poison`)."""
    found: dict[int, set[int]] = {}
    for event in events:
        if event["kind"] == "slot_skipped":
            found.setdefault(event["step"], set()).add(event["slot"])
    return found


def trained(commit: Commit) -> set[int]:
    """The slots that some group computed."""
    return {slot for slot, owner in enumerate(commit.owners) if owner >= 0}


def tokens_of(final: Sequence[Commit], training_s: float) -> dict[str, Any]:
    """`tokens` in the final state and `tokens_per_s` of training; None where the log does not say."""
    known = [commit.tokens for commit in final if commit.tokens is not None]
    total = sum(known) if len(known) == len(final) and final else None
    return {"tokens": total, "tokens_per_s": total / training_s if total is not None and training_s else None}


def protection_of(events: Iterable[dict[str, Any]]) -> str | None:
    """What the run's snapshots protect, in a sentence; None of a run that has none."""
    found = Protection()
    for event in events:
        found.take(event)
    return found.line() or None


def exchanged(events: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Of semi-synchronous training: `inner_steps` of a round, `payload_bytes`, what one rank gave into sums over the
    groups for each of them, the median over the rounds, `payload_share`, how much that is of one sum of its gradients,
    as each step of synchronous training makes, and `kept_bytes`, what all ranks together wrote of workers' own states
    for each inner step. None for synchronous training."""
    needed = ("inner_steps", "gradient_bytes")
    rounds = [e for e in events if e["kind"] == "commit" and all(map(e.get, needed)) and "payload_bytes" in e]
    if not rounds:
        return dict.fromkeys(("inner_steps", "payload_bytes", "payload_share", "kept_bytes"))
    payload = median(event["payload_bytes"] / event["inner_steps"] for event in rounds)
    share = payload / rounds[-1]["gradient_bytes"]
    inner_steps = rounds[-1]["inner_steps"]
    kept = sum(event.get("kept_bytes") or 0 for event in rounds) / (inner_steps * len({e["step"] for e in rounds}))
    return {"inner_steps": inner_steps, "payload_bytes": payload, "payload_share": share, "kept_bytes": kept}


def failures(events: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """What failed: `deaths` of a group's workers, `give_ups` with their reasons, and the newest `error` (an exception's
    type and first line; None: there was none)."""
    deaths, error, give_ups = 0, None, {}
    for event in events:
        if event["kind"] == "workers_died":
            deaths += 1
            error = event.get("error") or error
        elif event["kind"] == "agent_ended" and event.get("status") == "failed":
            give_ups[str(event.get("group"))] = event.get("reason")
    return {"deaths": deaths, "give_ups": give_ups, "error": error}


def samples(slots: Iterable[tuple[Commit, Collection[int]]], batch: int | None) -> int:
    """Samples in some slots of each commit, with `batch` samples in a whole step. While that is not known, a
    slot counts as one."""
    per_slot = ((batch / len(commit.owners) if batch and commit.owners else 1, chosen) for commit, chosen in slots)
    return round(sum(size * len(chosen) for size, chosen in per_slot))


def loss_by_step(commits: Iterable[Commit]) -> dict[int, float]:
    """Loss by step; steps whose loss was not recorded are left out."""
    return {commit.step: float(commit.loss) for commit in commits if commit.loss is not None}


def loss_delta(mine: dict[int, float], theirs: dict[int, float]) -> dict[str, Any]:
    """How far apart two loss curves are: loss_delta_max over the loss_delta_steps that both have, and
    loss_delta_undefined, in how many of those only one loss is finite or the two are not alike."""
    both = mine.keys() & theirs.keys()
    pairs = [(mine[step], theirs[step]) for step in both]
    finite = [abs(a - b) for a, b in pairs if math.isfinite(a) and math.isfinite(b)]
    undefined = [1 for a, b in pairs if not (math.isfinite(a) and math.isfinite(b)) and repr(a) != repr(b)]
    return {
        "loss_delta_max": max(finite, default=None),
        "loss_delta_steps": len(both),
        "loss_delta_undefined": len(undefined),
    }


def replicas_diverged(events: Iterable[dict[str, Any]]) -> int:
    """Audits that found a group's parameters to differ, counted once per step and group. Reads all ranks."""
    differing: set[tuple[Any, Any]] = set()
    for event in events:
        if event["kind"] == "audit" and not event.get("agreed", True):
            differing |= {(event.get("step"), group) for group in event.get("differing") or (None,)}
    return len(differing)


def verdict(figures: dict[str, Any], may_stop: bool = False) -> list[str]:
    """What breaks the promise, one sentence each, from the figures of `score`. Empty: it was kept.

    may_stop: a run that was stopped cleanly need not have reached its last step.
    """
    broken = []

    def expect(kept: bool, sentence: str) -> None:
        if not kept:
            broken.append(sentence)

    stopped, reason = may_stop and figures["status"] == "stopped", figures["reason"]
    done = figures["status"] == "done"
    ending = f"{figures['status']}{f', {reason}' if reason else ''}".rstrip(".")
    expect(done or stopped, f"The run is not done: {ending}.")
    expect(figures["steps"] > 0, "No step was committed.")
    asked, reached = figures["steps_asked"], figures["last_step"] or 0
    expect(not done or asked is None or reached >= asked, f"The run ended at step {reached} of {asked}.")
    count = figures["steps_unseen"]
    expect(count == 0, f"The log has no commit of {counted(count, 'step')} between the first and the last.")
    count = figures["attempts_thrown_away"]
    expect(count == 0, f"{counted(count, 'attempt')} had work of a survivor thrown away.")
    count = figures["samples_lost"]
    expect(count == 0, f"{counted(count, 'sample')} of the committed steps did not enter the model.")
    count = figures["samples_repeated"]
    expect(count == 0, f"{counted(count, 'sample')} entered the model more than once.")
    count = figures["replicas_diverged"]
    expect(count == 0, f"{counted(count, 'audit')} found a group whose parameters differ from the others'.")
    delta, count = figures["loss_delta_max"], figures["loss_delta_undefined"]
    expect((delta or 0.0) <= LOSS_TOLERANCE, f"The loss differs by up to {delta or 0.0:.3g} from the other run's.")
    expect(count == 0, f"In {counted(count, 'step')} the loss is finite in one run only.")
    return broken


def summary(figures: dict[str, Any], may_stop: bool = False) -> str:
    """The figures of `score` for a terminal: some lines of plain text, then what `verdict` says."""
    f = figures
    faults = ", ".join(f"{count} {name}" for name, count in sorted(f["faults"].items())) or "none"
    reason = f" ({f['reason']})" if f["reason"] else ""
    asked = f" of {f['steps_asked']}" if f["steps_asked"] is not None else ""
    skipped = f", {f['slots_skipped']} skipped as poison" if f["slots_skipped"] else ""
    dropped = f["commits_dropped"]
    given_up = f"; {counted(dropped, 'commit')} given up when the run went back to an older state" if dropped else ""
    lines = [
        ("run", f"{f['status']}{reason} after {_seconds(f['wall_s'])}"),
        ("faults", faults),
        ("steps", f"{f['steps']}{asked}{given_up}"),
        ("attempts", f"{f['attempts']}, {f['attempts_thrown_away']} thrown away"),
        ("samples", f"{f['samples']} trained, {f['samples_lost']} lost, {f['samples_repeated']} repeated"),
        ("slots", f"{f['slots_recomputed']} computed again{skipped}"),
        ("step", f"{_seconds(f['step_s_median'])} when healthy"),
        ("groups", f"{_number(f['groups_mean'])} on average"),
        ("delay", f"{_spread(f, 'delay_s')} (by which a fault made the run later)"),
        ("rejoin", _spread(f, "rejoin_s")),
        ("ETTR", f"{_number(f['ettr'])} (time that the steps needed, of the wall-clock time)"),
        ("goodput", f"{_number(f['goodput'])} ({f['goodput_definition']})"),
        ("kept", f"{_number(f['throughput_kept'])} (step rate while it trained, of the healthy one)"),
    ]
    if f["inner_steps"]:
        per_step = f"{f['payload_bytes'] / 2**20:.3f} MiB across groups per inner step"
        share = f"{f['payload_share']:.1%} of a synchronous step's gradients"
        kept = f"{f['kept_bytes'] / 2**20:.3f} MiB of workers' own states to the run directory"
        lines.append(("rounds", f"of {f['inner_steps']} inner steps; {per_step}, {share}; {kept}"))
    if f["give_ups"]:
        lines.append(("given up", "; ".join(f["give_ups"].values())))
    elif f["status"] == "failed" and f["error"]:
        lines.append(("error", f["error"]))
    if f["loss_delta_steps"]:
        largest = "unknown" if f["loss_delta_max"] is None else f"{f['loss_delta_max']:.3g}"
        lines.append(("loss", f"differs by at most {largest} over {counted(f['loss_delta_steps'], 'step')}"))
    if attention := covered(f):
        lines.append(("attention", attention))
    if any(f[f"findings_{action}"] for action in ACTIONS) or judged(f):
        counts = ", ".join(f"{f[f'findings_{action}']} {action}" for action in ACTIONS)
        lines.append(("findings", "; ".join(filter(None, (counts, judged(f))))))
    if f["snapshots"]:
        lines.append(("memory", f["snapshots"]))
    text = [f"{name:<9} {value}" for name, value in lines]
    return "\n".join([*text, *(verdict(f, may_stop) or ["Every step happened with its whole batch, exactly once."])])


def plain_summary(figures: dict[str, Any], run_dir: Path) -> str:
    """For a run without fault tolerance, whose steps and losses are torchtitan's to tell."""
    f = figures
    reason = f" ({f['reason']})" if f["reason"] else ""
    lines = [
        ("run", f"{f['status']}{reason} after {_seconds(f['wall_s'])}"),
        ("deaths", str(f["deaths"])),
        ("steps", f"see {run_dir}/logs/group-0/rank-0.log: without fault tolerance torchtitan alone tells of them"),
    ]
    if f["error"]:
        lines.append(("error", f["error"]))
    return "\n".join(f"{name:<9} {value}" for name, value in lines)


def _spread(figures: dict[str, Any], name: str) -> str:
    if figures[f"{name}_median"] is None:
        return "nothing to measure"
    return f"median {_seconds(figures[f'{name}_median'])}, longest {_seconds(figures[f'{name}_max'])}"


def counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _seconds(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.2f} s"


def _number(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.2f}"
