"""What ended an incarnation of a group: the death of one of its processes, as events and decisions tell it."""

import signal
import time

from everstep.launch.agent_settings import AgentSettings
from everstep.launch.children import Child
from everstep.launch.incarnation import Incarnation
from everstep.launch.memory import oom_kills
from everstep.launch.progress import StrikeWatch, newest_step
from everstep.launch.watchdog import Cause, Death, Stall, describe_exit
from everstep.launch.worker import WorkerError, read_error
from everstep.run.beats import beat_path, read_beat
from everstep.run.events import EventLog
from everstep.run.exits import HOPELESS_EXIT, UNFIT_EXIT, USAGE_EXIT
from everstep.run.poison import Slot, deaths_at, first_to_tell, strike

ORDERLY_EXITS = (USAGE_EXIT, HOPELESS_EXIT, UNFIT_EXIT)
"""A trainer's own decisions, which no slot makes for it."""


def error_of(settings: AgentSettings, first: Child) -> WorkerError | None:
    """The exception that a process ended with; None: it ended with none, or could not say."""
    told = first.kind == "worker" and (first.exitcode or 0) > 0
    return read_error(settings.run_dir, settings.group, first.index) if told else None


def death_of(
    settings: AgentSettings,
    now: Incarnation,
    first: Child,
    stall: Stall | None,
    strikes: StrikeWatch,
    *,
    peer_killed: bool,
) -> Death:
    """The death of `first`, which ended the incarnation.

    Args:
        stall: why the watchdog killed it, if it did.
        strikes: who was struck since the incarnation began.
        peer_killed: whether a signal ended a rank on another machine.
    """
    ft, exitcode, stalled = settings.fault_tolerance, first.exitcode or 0, stall is not None
    ran_s = time.monotonic() - now.started_mono
    others_struck, struck = strikes.struck()
    error = error_of(settings, first)
    return Death(
        mono=time.monotonic(),
        exitcode=exitcode,
        committed=now.committed if ft.enable else ran_s > ft.startup_timeout_s,
        error=error.first_line if error else "",
        cause=Cause(exitcode, error.type if error else "", error.place if error else "", stalled),
        excused=others_struck or peer_killed or (struck and (stalled or exitcode < 0)),
        struck=struck,
        stalled=stalled,
        out_of_memory=exitcode == -signal.SIGKILL and not stalled and oom_kills() > now.oom_kills,
        run_step=newest_step(settings.run_dir, settings.groups),
    )


def why(first: Child, death: Death, stall: Stall | None) -> str:
    """How the workers ended, in one sentence."""
    if stall is not None:
        return f"rank {stall.rank} stalled in {stall.phase} for {stall.idle_s:.1f} s"
    name = f"rank {first.index}" if first.kind == "worker" else "its store"
    sentence = f"{name} {describe_exit(death.exitcode)}"
    if death.out_of_memory:
        sentence += ", by the kernel: the memory of its control group was used up"
    return f"{sentence}: {death.error}" if death.error else sentence


def slot_of(settings: AgentSettings, child: Child) -> Slot | None:
    """The step and slot that a rank computed when it died; None: it computed none."""
    beat = read_beat(beat_path(settings.run_dir, settings.group, child.index)) if child.kind == "worker" else None
    computes = beat is not None and beat.pid == child.pid and beat.phase == "compute" and beat.slot >= 0
    return (beat.step, beat.slot) if beat is not None and computes else None


def is_poison(
    settings: AgentSettings, slot: Slot, incarnation: int, death: Death, reason: str, events: EventLog
) -> bool:
    """Note that workers ended at this slot of their own doing: whether it is poison by now, which the first to find it
    tells."""
    run_dir, group, groups = settings.run_dir, settings.group, settings.groups
    if not death.crashed or death.struck or death.exitcode in ORDERLY_EXITS:
        return False
    try:
        strike(run_dir, slot, group, incarnation, worked=death.committed, why=death.error or reason)
        known = deaths_at(run_dir, slot)
        tell = known.poisoned(groups) and first_to_tell(run_dir, slot)
    except OSError as error:  # a full disk must not keep the group from starting again
        print(f"slot {slot[1]} of step {slot[0]} is not noted as this death's: {error}", flush=True)
        return False
    if tell:
        events.emit(
            "poison_slot",
            slot[0],
            slot=slot[1],
            groups=sorted(known.deaths),
            error=death.error or reason,
            action=settings.fault_tolerance.on_poison,
        )
    return known.poisoned(groups)
