"""Computes every figure of report.json from the events of a run, ended or live. docs/report.md defines each field."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from everstep.report.account import Account, read
from everstep.report.faults import UNPROVOKED, cost_of_faults, normal_step_s
from everstep.report.groups import STATES
from everstep.report.lineage import Commit
from everstep.run.directory import require_events
from everstep.run.events import read_events

LOSS_TOLERANCE = 1e-4
"""Largest difference between the losses of two runs that `broken_promises` accepts. Sums in another order stay far
below it, a missing or repeated batch does not."""
ACTIONS = ("corrected", "recomputed", "refused")
"""What the attention check can do about a finding."""
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


def figures_of(account: Account, other: Account | None = None) -> dict[str, Any]:
    """Compute report.json from an account. Its losses are compared with those of `other`."""
    final, commits, faults = account.lineage.final(), account.lineage.commits, account.faults.found
    step_s = normal_step_s(commits, account.attempts.disturbed)
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
        "steps_unseen": max(steps) - min(steps) + 1 - len(steps) if steps else 0,
        "commits_dropped": len(commits) - len(final),
        "attempts": account.attempts.count,
        "attempts_thrown_away": account.attempts.thrown_away,
        "slots_recomputed": account.attempts.slots_recomputed,
        **samples(account, final),
        "kills": account.faults.kills,
        "deaths_unprovoked": sum(1 for fault in faults if fault.name == UNPROVOKED),
        "faults": dict(Counter(fault.name for fault in faults)),
        "step_s_median": step_s,
        **cost_of_faults(faults, step_s),
        **productivity(account, final, step_s),
        "deaths": account.faults.deaths,
        "give_ups": {str(group): why for group, one in going if (why := one.given_up) is not None},
        "error": account.troubles.error or None,
        "troubles": account.troubles.sentences,
        "replicas_diverged": len(account.distinct["audit"]),
        **checks(account),
        "snapshots": account.protection.line() or None,
        **exchange_figures(account.rounds),
        **loss_delta(loss_by_step(final), None if other is None else loss_by_step(other.lineage.final())),
    }


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
        computed = {slot for slot, owner in enumerate(commit.owners) if owner >= 0}
        counts["slots_skipped"] += len(skipped)
        counts["samples"] += in_a_slot * len(computed - skipped)
        counts["samples_lost"] += in_a_slot * len(commit.lost | skipped)
        counts["samples_repeated"] += in_a_slot * len(commit.repeated)
    return {name: round(count) for name, count in counts.items()}


def productivity(account: Account, final: Sequence[Commit], step_s: float | None) -> dict[str, Any]:
    """Compute times, the figures by which runs with failures are compared, and where the remaining time went.

    `ettr`: A. Kokolis and others, Revisiting Reliability in Large-Scale Machine Learning Research Clusters, 2024.
    `goodput`, and `badput` by cause: Google's ml-goodput-measurement. `throughput_kept`: the step rate over that
    without failures. All are between 0 and 1, or None if the events cannot tell.

    step_s: Duration of a healthy step.
    """
    account.current.close()
    commits, wall_s = len(account.lineage.commits), sum(session.wall_s for session in account.sessions)
    training_s = sum(session.training_s for session in account.sessions)
    useful_s = min(training_s, step_s * len(final)) if step_s is not None else None
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
    kept = sum(one["kept_bytes"] for one in rounds) / (inner_steps * len({one["step"] for one in rounds}))
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


def coverage_text(figures: Mapping[str, Any]) -> str:
    """Describe what the attention check covers and costs, from the fields of `checks`; "" if nothing is checked."""
    if figures["attention_coverage"] is None:
        return ""
    words = [f"{figures['attention_coverage']} parts checked"]
    if figures["attention_overhead"] is not None:
        words.append(f"{figures['attention_overhead']:.1%} of the time")
    if figures["attention_rate"] is not None:
        words.append(f"each layer in {figures['attention_rate']:.1%} of the slots")
    return ", ".join(words)


def refusals_text(figures: Mapping[str, Any]) -> str:
    """Describe what became of refused slots, from the fields of `checks`; "" if there were none."""
    counts = (
        ("ranks_unfit", "rank", "sent away as unfit"),
        ("slots_accepted", "slot", "accepted with findings"),
        ("slots_not_finite", "slot", "not finite on any group asked"),
    )
    return ", ".join(f"{counted(figures[name], noun)} {what}" for name, noun, what in counts if figures[name])


def broken_promises(figures: dict[str, Any]) -> list[str]:
    """Return a sentence for each way in which a run with these figures of `score` broke the promise; [] if it kept it.
    A run that was stopped kept it in the steps that it made."""
    f, diverged = figures, figures["replicas_diverged"]
    ending = f"{f['status']}{', ' + f['reason'] if f['reason'] else ''}".rstrip(".")
    done, asked, reached = f["status"] == "done", f["steps_asked"], f["last_step"] or 0
    unseen, delta, undefined = f["steps_unseen"], f["loss_delta_max"] or 0.0, f["loss_delta_undefined"]
    thrown, lost, repeated = f["attempts_thrown_away"], f["samples_lost"], f["samples_repeated"]
    broken = {
        f"The run is not done: {ending}.": f["status"] not in ("done", "stopped"),
        "No step was committed.": f["steps"] == 0,
        f"The run ended at step {reached} of {asked}.": done and asked is not None and reached < asked,
        f"The log lacks the commits of {counted(unseen, 'step')}, so these cannot be checked.": unseen,
        f"In {counted(thrown, 'attempt')} work of a surviving group was thrown away.": thrown,
        f"{counted(lost, 'sample')} of the committed steps did not enter the model.": lost,
        f"{counted(repeated, 'sample')} entered the model more than once.": repeated,
        f"Audits found {counted(diverged, 'group')} whose parameters differ (counted once in each audit).": diverged,
        "No step is in both runs, so no loss was compared.": f["loss_delta_steps"] == 0,
        f"The loss differs by up to {delta:.3g} from the other run's.": delta > LOSS_TOLERANCE,
        f"In {counted(undefined, 'step')} the losses differ, and at least one is not finite.": undefined,
    }
    return [sentence for sentence, holds in broken.items() if holds]


def summary(figures: dict[str, Any]) -> str:
    """Format the figures of `score` for a terminal: a table in plain text, then `broken_promises`, or KEPT."""
    return "\n".join([_table(lines_of(figures)), *(broken_promises(figures) or [KEPT])])


def lines_of(figures: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the figures as people read them on the terminal and on the page: pairs of a word and a sentence."""
    f = figures
    faults = ", ".join(f"{count} {name}" for name, count in sorted(f["faults"].items())) or "none"
    asked = f" of {f['steps_asked']}" if f["steps_asked"] is not None else ""
    skipped = f", {f['slots_skipped']} skipped as poison" if f["slots_skipped"] else ""
    dropped = f["commits_dropped"]
    given_up = f"; {counted(dropped, 'commit')} given up when the run went back to an older state" if dropped else ""
    badput = ", ".join(f"{share:.1%} {cause}" for cause, share in f["badput"].items() if share and share >= 0.0005)
    lines = [
        *_ending(f),
        ("faults", faults),
        ("steps", f"{f['steps']}{asked}{given_up}"),
        ("attempts", f"{f['attempts']}, {f['attempts_thrown_away']} thrown away"),
        ("samples", f"{f['samples']} trained, {f['samples_lost']} lost, {f['samples_repeated']} repeated"),
        ("slots", f"{f['slots_recomputed']} computed again{skipped}"),
        ("step", f"{duration(f['step_s_median'])} when healthy"),
        ("groups", f"{_number(f['groups_mean'])} on average, {_number(f['groups'], 'd')} asked for"),
        ("delay", f"{_spread(f, 'delay_s')} (by how much a fault made the run later)"),
        ("rejoin", _spread(f, "rejoin_s")),
        ("ETTR", f"{_number(f['ettr'])} (share of the wall-clock time that the steps needed)"),
        ("goodput", f"{_number(f['goodput'])} (share of the groups' time spent on steps of the final state)"),
        ("badput", badput or "none"),
        ("kept", f"{_number(f['throughput_kept'])} (step rate while training, over that of healthy steps)"),
        ("tokens", f"{_number(f['tokens'], ',.0f')}, {_number(f['tokens_per_s'], ',.0f')} a second"),
    ]
    if f["inner_steps"]:
        sent = f"{f['payload_share']:.1%} of a synchronous step's gradients are sent"
        lines.append(("rounds", f"of {f['inner_steps']} inner steps; for each, {sent}"))
    if f["loss_delta_steps"]:
        largest = _number(f["loss_delta_max"], ".3g")
        lines.append(("loss", f"differs by at most {largest} over {counted(f['loss_delta_steps'], 'step')}"))
    if attention := coverage_text(f):
        lines.append(("attention", attention))
    if any(f[f"findings_{action}"] for action in ACTIONS) or refusals_text(f):
        counts = ", ".join(f"{f[f'findings_{action}']} {action}" for action in ACTIONS)
        lines.append(("findings", "; ".join(filter(None, (counts, refusals_text(f))))))
    if f["snapshots"]:
        lines.append(("memory", f["snapshots"]))
    return lines


def plain_summary(figures: dict[str, Any], run_dir: Path) -> str:
    """Format the summary of a run without fault tolerance. Only torchtitan's own log has its steps and losses."""
    log = f"see {run_dir}/logs/group-0/rank-0.log: without fault tolerance only torchtitan's log has them"
    return _table([*_ending(figures), ("steps", log)])


def _ending(figures: dict[str, Any]) -> list[tuple[str, str]]:
    """Return lines on how the run ended, and which troubles it had then."""
    reason = f" ({figures['reason']})" if figures["reason"] else ""
    ending = ("run", f"{figures['status']}{reason} after {duration(figures['wall_s'])}")
    return [ending, *(("wrong", sentence) for sentence in figures["troubles"])]


def _table(lines: Iterable[tuple[str, str]]) -> str:
    return "\n".join(f"{name:<9} {value}" for name, value in lines)


def _spread(figures: dict[str, Any], name: str) -> str:
    if figures[f"{name}_median"] is None:
        return "not measured"
    return f"median {duration(figures[f'{name}_median'])}, longest {duration(figures[f'{name}_max'])}"


def duration(value: float | None) -> str:
    """Format seconds for a reader: 1.42 s, 29 min, 3.4 h, 12.0 d."""
    if value is None:
        return "unknown"
    for size, unit in ((86400, "d"), (3600, "h")):
        if value >= 2 * size:
            return f"{value / size:.1f} {unit}"
    return f"{value / 60:.0f} min" if value >= 600 else f"{value:.2f} s"


def _number(value: float | None, form: str = ".2f") -> str:
    return "unknown" if value is None else format(value, form)


def counted(count: int, noun: str) -> str:
    """Format a count with its noun: 1 step, 2 steps."""
    return f"{count} {noun}{'' if count == 1 else 's'}"
