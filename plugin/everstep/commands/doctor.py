"""`everstep doctor`: whether a config can run here, and would survive failures.

Each check is a function of values that returns a Check; `run_checks` runs them. Only the run directory is changed: it
is made if it is missing, and a small probe file is written.
"""

import os
import socket
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from json import dumps
from pathlib import Path

import tyro

from everstep.config.sections import FaultTolerance
from everstep.launch.machine import PORTS, free_port, storage_complaint
from everstep.launch.prepare import Check, Prepared, PrepareOptions, prepare_in_subprocess
from everstep.quorum.interface import InterfaceError, interface_of
from everstep.run.directory import LaunchError, make_run_dir
from everstep.run.files import locked
from everstep.run.token import require_own

HANG_TOLERANT_GROUPS = 3


def doctor(
    config: tyro.conf.Positional[Path],
    groups: int | None = None,
    nodes_per_group: int = 1,
    ranks_per_group: int = 1,
    run_dir: Path | None = None,
    json: bool = False,
    flags: Sequence[str] = (),
) -> int:
    """Check whether a config can run on this machine, and whether the run would survive failures. Each line says ok,
    warning or error, and what to do. On a cluster run it on each node: srun everstep doctor CONFIG.toml --run-dir DIR.

    Flags that are not listed here are torchtitan's. Exit status: 1 if a check found an error, else 0.

    Args:
        config: The run's TOML file.
        groups: Number of replica groups. Default: fault_tolerance.groups of the file.
        nodes_per_group: Number of nodes in each group.
        ranks_per_group: Number of ranks (processes, GPUs) in each group.
        run_dir: The run directory, to check that it can be written to and that no other user can write to it.
        json: Print one JSON object to stdout, and nothing else.
    """
    if min(groups or 1, nodes_per_group, ranks_per_group) < 1 or ranks_per_group % nodes_per_group:
        raise LaunchError("--groups and --nodes-per-group must be at least 1, and --ranks-per-group a multiple of it.")
    run_dir = None if run_dir is None else run_dir.resolve()
    options = PrepareOptions(
        config=str(config),
        flags=list(flags),
        groups=groups,
        ranks=ranks_per_group,
        # All groups are on this machine, unless a batch system spreads them or a group takes several nodes.
        together=nodes_per_group == 1 and "SLURM_JOB_ID" not in os.environ,
        model=True,
    )
    try:
        found = prepare_in_subprocess(options)
    except LaunchError as error:
        lines = [Check("config", "error", str(error), "change the file or the flag")]
    else:
        host = found.fault_tolerance.bind_host or interface_of("").address
        lines = list(run_checks(found, nodes_per_group, run_dir, host))
    print(dumps({"ok": not has_errors(lines), "checks": list(map(asdict, lines))}) if json else as_text(lines))
    return int(has_errors(lines))


def run_checks(config: Prepared, nodes_per_group: int, run_dir: Path | None, host: str) -> Iterator[Check]:
    """Yield all lines.

    host: This machine's address if it will train, or "" on a login node, whose network, memory and GPUs are not
    checked.
    """
    ft = config.fault_tolerance
    if not ft.enable:
        found = "off: if a worker dies, the run ends until it is started again"
        yield Check("fault tolerance", "warning", found, "set [fault_tolerance] enable = true")
    yield check_group_count(ft, config.groups)
    if run_dir is not None:
        yield check_run_directory(run_dir)
    if not host:
        return
    yield check_network(host, config.groups * nodes_per_group)
    for warning in config.warnings:
        yield Check("config", "warning", warning)
    yield from config.lines


def check_group_count(ft: FaultTolerance, groups: int) -> Check:
    """Return what the number of groups lets the run survive."""
    if groups == 1:
        found = "1: no other group has the state while it restarts"
        return Check("groups", "warning", found, "use 2, better 3 or more")
    if ft.min_groups == groups:
        found = f"min_groups = groups = {groups}: every step waits for all groups"
        return Check("groups", "warning", found, "lower min_groups to go on while a group restarts")
    if groups < HANG_TOLERANT_GROUPS:
        found = (
            f"{groups}: a quorum takes more than half of the groups that still send heartbeats, so a group that hangs "
            f"stops the other for stall_timeout_s = {ft.stall_timeout_s:g}"
        )
        return Check("groups", "warning", found, f"use {HANG_TOLERANT_GROUPS} or more; deaths are survived as it is")
    return Check("groups", "ok", f"{groups}: the run survives groups that die or hang, down to {ft.min_groups}")


def check_run_directory(run_dir: Path) -> Check:
    """Return whether the directory can be made and written to, and no other user can write to it."""
    try:
        make_run_dir(run_dir)
        require_own(run_dir)
        with locked(run_dir / "state" / "doctor"):
            pass
        complaint = storage_complaint(run_dir)
    except OSError as error:
        return Check("run directory", "error", f"{run_dir}: {error.strerror}", "repair it, or give another --run-dir")
    except ValueError as error:
        return Check("run directory", "error", str(error), "use a directory that no other user can write to")
    if complaint:
        return Check("run directory", "error", complaint, "make room or repair it, or give another --run-dir")
    return Check("run directory", "ok", f"{run_dir} is writable from {socket.gethostname()}")


def check_network(host: str, nodes: int) -> Check:
    """Return whether `host`, which sums, heals and stores use, is an address of this machine with free ports."""
    advice = "set [fault_tolerance] bind_host, or --host, to an address that the other nodes reach"
    try:
        addresses = {str(info[4][0]) for info in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
        port = free_port(host)
    except (OSError, LaunchError) as error:
        return Check("network", "error", f"{host}: {getattr(error, 'strerror', None) or error}", advice)
    places = ", ".join(sorted(addresses))
    if nodes > 1 and all(address == "::1" or address.startswith("127.") for address in addresses):
        found = f"{host} is {places}: only processes on this machine reach it"
        return Check("network", "warning", found, f"{advice}, unless all groups run here")
    try:
        card = interface_of(host)
    except InterfaceError as error:
        return Check("network", "error", str(error), advice)
    named = host if host == card.address else f"{host} is {card.address}"
    found = f"{named} on {card.name}: heals, stores, Gloo and NCCL go through it; port {port}"
    return Check("network", "ok", f"{found} and others of {PORTS.start} to {PORTS.stop} are free")


def as_text(lines: Sequence[Check]) -> str:
    """Format one line for each check, with what to do below it."""
    text = []
    for line in lines:
        text.append(f"{line.verdict:<8} {line.check}: {line.found}")
        if line.advice:
            text.append(f"{'':<8} → {line.advice}")
    return "\n".join(text)


def has_errors(lines: Sequence[Check]) -> bool:
    """Whether a check found an error, so that the run should not be started."""
    return any(line.verdict == "error" for line in lines)
