"""`everstep doctor`: will this config run here, and survive what it should? Each check is a line that says so.

A check is a function of values that yields lines; `examine` collects the values and runs the checks. Nothing is changed
but a small probe file in the run directory.
"""

import os
import socket
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from everstep.config.sections import FaultTolerance
from everstep.launch.machine import PORTS, free_port, sharing_complaint, storage_complaint
from everstep.launch.prepare import Model, Prepared
from everstep.quorum.interface import InterfaceError, interface_of
from everstep.run.directory import LaunchError, make_run_dir
from everstep.run.token import require_own

Verdict = Literal["ok", "warning", "error"]
HANG_TOLERANT_GROUPS = 3


@dataclass(frozen=True)
class Line:
    """What one look found. `advice` is what to do, "" for nothing."""

    check: str
    verdict: Verdict
    found: str
    advice: str = ""


@dataclass(frozen=True)
class Plan:
    """The run that is examined. `here`: whether this machine is one of those it will run on; a login node is not,
    and its network, memory and GPUs are not looked at."""

    config: Prepared
    nodes_per_group: int
    run_dir: Path | None
    host: str
    here: bool = True

    @property
    def groups_here(self) -> int:
        """All groups run on one machine, unless a batch system spreads them or a group takes several nodes."""
        return self.config.groups if self.nodes_per_group == 1 and "SLURM_JOB_ID" not in os.environ else 1

    @property
    def ranks_here(self) -> int:
        return self.groups_here * max(1, self.config.ranks // self.nodes_per_group)


def examine(plan: Plan) -> Iterator[Line]:
    """All lines."""
    config, ft, model = plan.config, plan.config.fault_tolerance, plan.config.model
    nodes = config.groups * plan.nodes_per_group
    if not ft.enable:
        found = "off: a death ends the run until somebody starts it again"
        yield Line("fault tolerance", "warning", found, "set [fault_tolerance] enable = true")
    if model is not None:
        yield from patience(ft, config.ranks, model.train_timeout_s)
    yield group_count(ft, config.groups)
    if plan.run_dir is not None:
        yield run_directory(plan.run_dir)
    if not plan.here:
        return
    yield network(plan.host, nodes)
    for warning in config.warnings:
        yield Line("config", "warning", warning)
    if model is None:
        return
    yield from config_and_model(model)
    if complaint := sharing_complaint(config.devices, plan.ranks_here, ft.process_group):
        yield Line("accelerators", "error", complaint)


def patience(ft: FaultTolerance, ranks: int, train_timeout_s: float) -> Iterator[Line]:
    """Whether torchtitan's patience for a collective inside of a group of `ranks` outlasts what one of them may wait
    for among the groups. A config whose own waits contradict each other is refused."""
    longest_s, name = max((ft.quorum_timeout_s, "quorum_timeout_s"), (ft.reduce_timeout_s, "reduce_timeout_s"))
    if ft.enable and ranks > 1 and train_timeout_s <= longest_s:
        found = (
            f"[comm] train_timeout_seconds = {train_timeout_s:g} is no longer than [fault_tolerance] {name} = "
            f"{longest_s:g}: a rank that waits for another group ends its own"
        )
        yield Line("timeouts", "warning", found, f"set train_timeout_seconds above {longest_s:g}")


def group_count(ft: FaultTolerance, groups: int) -> Line:
    """What the number of groups lets the run survive."""
    if groups == 1:
        return Line("groups", "warning", "1: nobody holds the state while it restarts", "use 2, better 3 or more")
    if ft.min_groups == groups:
        found = f"min_groups = groups = {groups}: every step waits until all are there"
        return Line("groups", "warning", found, "lower min_groups to go on while a group restarts")
    if groups < HANG_TOLERANT_GROUPS:
        found = (
            f"{groups}: a quorum takes more than half of the groups that still send heartbeats, so one that hangs "
            f"stops the other for stall_timeout_s = {ft.stall_timeout_s:g}"
        )
        return Line("groups", "warning", found, f"use {HANG_TOLERANT_GROUPS} or more; deaths are survived as it is")
    return Line("groups", "ok", f"{groups}: dead ones and hanging ones are survived, down to {ft.min_groups}")


def run_directory(run_dir: Path) -> Line:
    """Whether it can be made, takes writes, and belongs to nobody else."""
    try:
        make_run_dir(run_dir)
        require_own(run_dir)
        complaint = storage_complaint(run_dir)
    except OSError as error:
        return Line("run directory", "error", f"{run_dir}: {error.strerror}", "give another --run-dir, or mend it")
    except ValueError as error:
        return Line("run directory", "error", str(error), "what others can write to is not acted on")
    if complaint:
        return Line("run directory", "error", complaint, "make room or mend it, or give another --run-dir")
    return Line("run directory", "ok", f"{run_dir} is writable from {socket.gethostname()}")


def network(host: str, nodes: int) -> Line:
    """Whether `host`, which sums, heals and stores use, is an address of this machine with ports to spare."""
    advice = "set [fault_tolerance] bind_host, or --host, to an address that the other nodes reach"
    try:
        addresses = {str(info[4][0]) for info in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
        port = free_port(host)
    except (OSError, LaunchError) as error:
        return Line("network", "error", f"{host}: {getattr(error, 'strerror', None) or error}", advice)
    places = ", ".join(sorted(addresses))
    if nodes > 1 and all(address == "::1" or address.startswith("127.") for address in addresses):
        found = f"{host} is {places}: only processes on this machine reach it"
        return Line("network", "warning", found, f"{advice}, unless all groups run here")
    try:
        card = interface_of(host)
    except InterfaceError as error:
        return Line("network", "error", str(error), advice)
    found = f"{host} is {card.address} on {card.name}: heals, stores, Gloo and NCCL go through it; port {port}"
    return Line("network", "ok", f"{found} and others of {PORTS.start} to {PORTS.stop} are free")


def config_and_model(model: Model) -> Iterator[Line]:
    """How large the model is, and whether `[attention_check]` sees all of it."""
    size = f"{model.state_bytes / 1e9:.2f} GB with the optimizer's states"
    yield Line("config", "ok", f"{model.parameters / 1e6:,.1f} M parameters: {size} in each group")
    yield Line("memory", "ok", f"{model.memory}; activations come on top")
    if model.checked is not None:
        found = f"{model.checked} linear layers and kernels are checked"
        if model.sampled:
            found += ", in every slot for extremes alone: a moderate error in a slot that is not drawn is not seen"
        if model.unchecked:
            advice = "set [attention_check] enable = false: a model that is checked in part does not start"
            yield Line("attention", "error", f"{found}; {', '.join(model.unchecked)} would not be", advice)
        else:
            yield Line("attention", "ok", found)


def show(lines: Sequence[Line]) -> str:
    """One line each, with what to do below."""
    text = []
    for line in lines:
        text.append(f"{line.verdict:<8} {line.check}: {line.found}")
        if line.advice:
            text.append(f"{'':<8} → {line.advice}")
    return "\n".join(text)


def to_json(lines: Sequence[Line]) -> dict[str, Any]:
    """{"ok": whether nothing is an error, "checks": [...]}."""
    return {"ok": not broken(lines), "checks": [asdict(line) for line in lines]}


def broken(lines: Sequence[Line]) -> bool:
    """Whether the run should not be started like this."""
    return any(line.verdict == "error" for line in lines)
