"""Computes every figure of report.json from the events of a run, ended or live. docs/report.md defines each field."""

import itertools
import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from string import Formatter
from typing import Any

from everstep.report.account import Account, read
from everstep.report.faults import UNPROVOKED, Pace, cost_of_faults
from everstep.report.groups import STATES
from everstep.report.lineage import Commit
from everstep.run.directory import require_events
from everstep.run.events import read_events

LOSS_TOLERANCE = 1e-4
"""Largest difference between the losses of two runs that `broken_promises` accepts. Sums in another order stay far
below it, a missing or repeated batch does not."""
ACTIONS = ("corrected", "recomputed", "refused")
"""What the attention check can do about a finding."""
LINES = {
    "run": "{status} after {wall_s:time}",
    "reason": "{reason}",
    "faults": "{faults}",
    "steps": "{steps} of {steps_asked}",
    "dropped": "{commits_dropped} committed steps, as the run went back to an older state",
    "attempts": "{attempts}, {attempts_thrown_away} thrown away",
    "samples": "{samples} trained, {samples_lost} lost, {samples_repeated} repeated",
    "slots": "{slots_recomputed} computed again, {slots_skipped} skipped as poison",
    "step": "{step_s_median:time} when healthy",
    "groups": "{groups_mean:.2f} on average, {groups} asked for",
    "delay": "median {delay_s_median:time}, longest {delay_s_max:time} (by how much a fault made the run later)",
    "rejoin": "median {rejoin_s_median:time}, longest {rejoin_s_max:time}",
    "down": "{down_s:time} between starts, which no other figure counts",
    "ETTR": "{ettr:.2f} (share of the starts' wall-clock time that the steps needed)",
    "goodput": "{goodput:.2f} (share of the groups' time spent on steps of the final state)",
    "badput": "{badput:.1%}",
    "kept": "{throughput_kept:.2f} (step rate while training, over that of healthy steps)",
    "tokens": "{tokens:,.0f}, {tokens_per_s:,.0f} a second",
    "rounds": "of {inner_steps} inner steps; for each, {payload_share:.1%} of a synchronous step's gradients are sent",
    "loss": "differs by at most {loss_delta_max:.3g}; steps compared: {loss_delta_steps}",
    "attention": "{attention_coverage} parts checked, overhead {attention_overhead:.1%}, rate {attention_rate:.1%}",
    "findings": "{findings_corrected} corrected, {findings_recomputed} recomputed, {findings_refused} refused",
    "refused": "slots accepted {slots_accepted}, not finite {slots_not_finite}; ranks unfit {ranks_unfit}",
    "memory": "{snapshots}",
}
"""Word -> what the terminal and the page say of the figures named in it."""
KEPT = "Every step happened with its whole batch, exactly once."


def account_of(run_dir: Path) -> Account:
    """Read a run's events into an account. Raises LaunchError if `run_dir` holds no event log."""
    require_events(run_dir)
    return read(read_events(run_dir))


def score(run_dir: Path, against: Path | None = None) -> dict[str, Any]:
    """Compute report.json of a run, one flat dict. A figure that the events cannot tell is None.

    against: Directory of another run of the same config, to compare the losses with. Raises LaunchError if a directory
    holds no event log.
    """
    return figures_of(account_of(run_dir), account_of(against) if against is not None else None)


def figures_of(account: Account, other: Account | None = None, pace: Pace | None = None) -> dict[str, Any]:
    """Compute report.json from an account; `pace` is its own. Its losses are compared with those of `other`."""
    final, commits, faults = account.lineage.final(), account.lineage.commits, account.faults.found
    pace = pace or Pace(account.lineage)
    steps = {commit.step for commit in final}
    ending, going = account.current.ending or {}, sorted(account.current.groups.items())
    return {
        "status": account.status,
        "reason": ending.get("reason"),
        "sessions": len(account.sessions),
        "groups": account.current.asked or None,
        "groups_mean": groups_mean(commits),
        "steps_asked": account.steps,
        "steps": len(steps),
        "first_step": min(steps, default=None),
        "last_step": max(steps, default=None),
        "steps_unseen": max(steps) - min(account.begin or 1, *steps) + 1 - len(steps) if steps else 0,
        "commits_dropped": len(commits) - len(final),
        "attempts": account.attempts.count,
        "attempts_thrown_away": account.attempts.thrown_away,
        "slots_recomputed": account.attempts.slots_recomputed,
        **samples(account, final),
        "kills": account.faults.kills,
        "deaths_unprovoked": sum(1 for fault in faults if fault.name == UNPROVOKED),
        "faults": dict(Counter(fault.name for fault in faults)),
        "step_s_median": pace.at(account.current, math.inf),
        **cost_of_faults(faults, pace),
        **productivity(account, final, pace),
        "deaths": account.faults.deaths,
        "give_ups": {str(group): why for group, one in going if (why := one.given_up) is not None},
        "error": account.troubles.error or None,
        "troubles": account.troubles.sentences,
        "replicas_diverged": len(account.distinct["audit"]),
        **checks(account),
        "snapshots": account.protection.line() or None,
        **exchange_figures([*account.rounds.values()]),
        **loss_delta(loss_by_step(final), None if other is None else loss_by_step(other.lineage.final())),
    }


def to_json(figures: Mapping[str, Any]) -> str:
    """Format report.json. A sum that is beyond the range of floats is null, as JSON has no infinity."""
    endless = [name for name, value in figures.items() if isinstance(value, float) and not math.isfinite(value)]
    return json.dumps({**figures, **dict.fromkeys(endless)}, indent=2)


def groups_mean(commits: Iterable[Commit]) -> float | None:
    """Return the mean number of groups in a commit, weighted by the time since the parent commit, or by the duration
    that the step reports if that is unknown."""
    weights = [(commit.gap_s or commit.took_s or 0.0, len(commit.groups)) for commit in commits]
    total_s = sum(gap_s for gap_s, _ in weights)
    return sum(gap_s * count for gap_s, count in weights) / total_s if total_s else None


def samples(account: Account, final: Sequence[Commit]) -> dict[str, int]:
    """Count the samples in the steps of the final state: `samples` that a group computed, `samples_lost` that are
    missing, `samples_repeated` that are in a step more than once. `slots_skipped` counts slots left out as poison. If
    the number of samples in a step is unknown, a slot counts as one."""
    counts = dict.fromkeys(("slots_skipped", "samples", "samples_lost", "samples_repeated"), 0.0)
    poison: dict[int, set[int]] = {}
    for step, slot in account.distinct["slot_skipped"]:
        poison.setdefault(step, set()).add(slot)
    for commit in final:
        in_a_slot = account.batch / len(commit.owners) if account.batch and commit.owners else 1
        skipped = poison.get(commit.step, set())
        computed = range(len(commit.owners))
        if skipped or commit.lost:  # else the loop would take half of a long run's report
            computed = [slot for slot in computed if commit.owners[slot] >= 0 and slot not in skipped]
        counts["slots_skipped"] += len(skipped)
        counts["samples"] += in_a_slot * len(computed)
        counts["samples_lost"] += in_a_slot * len(commit.lost | skipped)
        counts["samples_repeated"] += in_a_slot * len(commit.repeated)
    return {name: round(count) for name, count in counts.items()}


def productivity(account: Account, final: Sequence[Commit], pace: Pace) -> dict[str, Any]:
    """Compute times, the figures by which runs with failures are compared, and where the remaining time went.

    `ettr`: A. Kokolis and others, Revisiting Reliability in Large-Scale Machine Learning Research Clusters, 2024.
    `goodput`, and `badput` by cause: Google's ml-goodput-measurement. `throughput_kept`: the step rate over that
    without failures. All are between 0 and 1, or None if the events cannot tell.
    """
    account.current.close()
    commits, wall_s = len(account.lineage.commits), sum(session.wall_s for session in account.sessions)
    training_s = sum(session.training_s for session in account.sessions)
    kept = set(final)
    usual = [pace.at(session, one.t) for session in account.sessions for one in session.commits if one in kept]
    useful_s = min(training_s, sum(filter(None, usual))) if any(usual) else None
    tokens = sum(commit.tokens for commit in final) if final else None
    spent = {state: sum(times[state] for times in account.spent.values()) for state in STATES}
    shares = dict(spent)
    shares["lost"] = spent["productive"] * (commits - len(final)) / commits if commits else 0.0
    shares["productive"] -= shares["lost"]
    asked_s = sum(session.asked_s for session in account.sessions)
    shares["idle"] = max(0.0, asked_s - sum(spent.values()))
    shares = {state: _share(seconds, sum(shares.values())) for state, seconds in shares.items()}
    goodput = shares.pop("productive")
    return {
        "wall_s": wall_s,
        "down_s": sum(max(0.0, b.begin - a.end) for a, b in itertools.pairwise(account.sessions)),
        "training_s": training_s,
        "tokens": tokens,
        "tokens_per_s": tokens / training_s if tokens is not None and training_s else None,
        "ettr": _share(useful_s, wall_s),
        "goodput": goodput,
        "throughput_kept": _share(useful_s, training_s),
        "badput": shares if goodput is not None else {},
        **{f"{state.replace('-', '_')}_s": seconds for state, seconds in spent.items()},
        "time_by_group": {str(group): dict(account.spent[group]) for group in sorted(account.spent)},
    }


def _share(part: float | None, whole: float) -> float | None:
    return None if part is None or whole <= 0 else min(1.0, max(0.0, part / whole))


def exchange_figures(rounds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Compute what semi-synchronous training sends, from `Account.rounds`. All are None for synchronous training.

    `inner_steps`: steps of a round. The others are per inner step. `payload_bytes`: bytes that one rank puts into sums
    over the groups (median). `payload_share`: these bytes over those of a rank's gradients, which synchronous training
    would sum in each step. `kept_bytes`: bytes of workers' own states that all ranks together copy."""
    if not rounds:
        return dict.fromkeys(("inner_steps", "payload_bytes", "payload_share", "kept_bytes"))
    payload = median(one["payload_bytes"] / one["inner_steps"] for one in rounds)
    share = payload / rounds[-1]["gradient_bytes"]
    inner_steps = rounds[-1]["inner_steps"]
    kept = sum(one["kept_bytes"] for one in rounds) / (inner_steps * len(rounds))
    return {"inner_steps": inner_steps, "payload_bytes": payload, "payload_share": share, "kept_bytes": kept}


def loss_by_step(commits: Iterable[Commit]) -> dict[int, float]:
    """Return step -> loss; of a step that was made again, the loss of the last commit."""
    return {commit.step: float(commit.loss) for commit in commits}


def loss_delta(mine: dict[int, float], theirs: dict[int, float] | None) -> dict[str, Any]:
    """Compare two curves, each step -> loss. `loss_delta_max`: largest difference over the `loss_delta_steps` that both
    have. `loss_delta_undefined`: in how many of these only one loss is finite, or both are not and differ. `theirs` is
    None, and so are the largest difference and the number of steps, if there is no other run."""
    if theirs is None:
        return {"loss_delta_max": None, "loss_delta_steps": None, "loss_delta_undefined": 0}
    pairs = [(mine[step], theirs[step]) for step in mine.keys() & theirs.keys()]
    finite = [abs(a - b) for a, b in pairs if math.isfinite(a) and math.isfinite(b)]
    alike = [a for a, b in pairs if repr(a) == repr(b) and not math.isfinite(a)]
    return {
        "loss_delta_max": max(finite, default=None),
        "loss_delta_steps": len(pairs),
        "loss_delta_undefined": len(pairs) - len(finite) - len(alike),
    }


def checks(account: Account) -> dict[str, Any]:
    """Return report.json's fields on the attention check: findings, what became of refused slots, and what is checked.
    Overhead is that of the rank for which the check costs the most, rate that of the rank that checks the least."""
    plans = [*account.current.schedules.values()]
    known = {name: [plan[name] for plan in plans if plan.get(name) is not None] for name in ("overhead", "rate")}
    return {name: account.counts[name] for name in (f"findings_{action}" for action in ACTIONS)} | {
        "ranks_unfit": account.counts["unfit"],
        "slots_accepted": len(account.distinct["slot_accepted"]),
        "slots_not_finite": len(account.distinct["not_finite"]),
        "attention_coverage": plans[0]["coverage"] if plans else None,
        "attention_overhead": max(known["overhead"], default=None),
        "attention_rate": min(known["rate"], default=None),
    }


def broken_promises(figures: dict[str, Any]) -> list[str]:
    """Return a sentence for each way in which a run with these figures of `score` broke the promise; [] if it kept it.
    A run that was stopped kept it in the steps that it made."""
    f, delta = figures, figures["loss_delta_max"] or 0.0
    ending = f"{f['status']}{', ' + f['reason'] if f['reason'] else ''}".rstrip(".")
    asked, reached = f["steps_asked"], f["last_step"] or 0
    ended_early = f["status"] == "done" and asked is not None and reached < asked
    broken = {
        f"The run is not done: {ending}.": f["status"] not in ("done", "stopped"),
        "No step was committed.": f["steps"] == 0,
        f"The run ended at step {reached} of {asked}.": ended_early,
        f"Steps that cannot be checked, as the log lacks their commits: {f['steps_unseen']}.": f["steps_unseen"],
        f"Attempts that threw work of a survivor away: {f['attempts_thrown_away']}.": f["attempts_thrown_away"],
        f"Samples of committed steps that did not enter the model: {f['samples_lost']}.": f["samples_lost"],
        f"Samples that entered the model more than once: {f['samples_repeated']}.": f["samples_repeated"],
        f"Groups that audits found to differ, once per audit: {f['replicas_diverged']}.": f["replicas_diverged"],
        "No step is in both runs, so no loss was compared.": f["loss_delta_steps"] == 0,
        f"The loss differs by up to {delta:.3g} from the other run's.": delta > LOSS_TOLERANCE,
        f"Steps whose non-finite losses differ: {f['loss_delta_undefined']}.": f["loss_delta_undefined"],
    }
    return [sentence for sentence, holds in broken.items() if holds]


def summary(figures: dict[str, Any]) -> str:
    """Format the figures of `score` for a terminal: a table in plain text, then `broken_promises`, or KEPT."""
    table = [f"{word:<9} {text}" for word, text in lines_of(figures)]
    return "\n".join([*table, *(broken_promises(figures) or [KEPT])])


def lines_of(figures: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return figures as people read them on the terminal and on the page: pairs of a word and a sentence, by LINES. A
    line is left out if none of its figures is known, or all are 0 or empty."""
    lines = [("wrong", sentence) for sentence in figures.get("troubles", ())]
    for word, text in LINES.items():
        names = [name for _, name, _, _ in _TEXT.parse(text) if name]
        if any(figures.get(name) for name in names):
            lines.append((word, _TEXT.vformat(text, (), {name: figures.get(name) for name in names})))
    return lines


class _Text(Formatter):
    """Formats figures that may be unknown, and dicts as values with names. `time` is the format of `duration`."""

    def format_field(self, value: Any, format_spec: str) -> str:
        if value is None:
            return "unknown"
        if isinstance(value, Mapping):
            return ", ".join(f"{format(one, format_spec)} {name}" for name, one in value.items() if round(one, 3))
        return duration(value) if format_spec == "time" else format(value, format_spec)


_TEXT = _Text()


def duration(value: float) -> str:
    """Format seconds for a reader: 1.42 s, 29 min, 3.4 h, 12.0 d."""
    for size, unit in ((86400, "d"), (3600, "h")):
        if value >= 2 * size:
            return f"{value / size:.1f} {unit}"
    return f"{value / 60:.0f} min" if value >= 600 else f"{value:.2f} s"
