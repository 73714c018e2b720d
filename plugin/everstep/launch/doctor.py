"""`everstep doctor`: will this config run here, and survive what it should? Each check is a line that says so.

A check is a function of values that yields lines; `examine` collects the values and runs the checks. Nothing is changed
but a small probe file in the run directory, one for each node that looked.
"""

import importlib.metadata
import json
import os
import resource
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import psutil
from packaging.requirements import Requirement

from everstep.config.checks import timeout_problems
from everstep.config.sections import FaultTolerance
from everstep.launch import links, node
from everstep.launch.machine import PORTS, free_port
from everstep.launch.probe import answers
from everstep.run.address import published_address
from everstep.run.beats import shared_lag_s
from everstep.run.directory import LaunchError
from everstep.run.fence import LEASE_S
from everstep.run.files import read_json, write_json
from everstep.run.token import require_own
from everstep.snapshot import stripes
from everstep.snapshot.section import Snapshot

Verdict = Literal["ok", "warning", "error"]
HANG_TOLERANT_GROUPS = 3
SKEW_WARNING_S, SKEW_ERROR_S = 1.0, LEASE_S
SHORTEST_HEARTBEAT_TIMEOUT_S = 1.0
ESTIMATE_TIMEOUT_S = 600.0
PROBES = Path("state") / "doctor"
FEWEST_FILES, FILES_FOR_A_NODE, FEWEST_PROCESSES = 512, 8, 256
OURS = ("torch", "torchtitan", "torchft")


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
    and its network and memory are not looked at."""

    config: Path
    flags: Sequence[str]
    fault_tolerance: FaultTolerance
    snapshot: Snapshot
    groups: int
    nodes_per_group: int
    run_dir: Path | None
    host: str
    here: bool = True
    ranks_per_group: int = 1
    allow_dropped: bool = False
    measure_s: float = 0.0
    """How long to wait for the doctors of other hosts, to measure the way to them. 0: nothing is measured."""


def examine(plan: Plan) -> Iterator[Line]:
    """All lines, the quick ones first."""
    yield from versions(importlib.metadata.requires("everstep") or [], _installed)
    if not plan.fault_tolerance.enable:
        found = "off: a death ends the run until somebody starts it again"
        yield Line("fault tolerance", "warning", found, "set [fault_tolerance] enable = true")
    yield from timeouts(plan.fault_tolerance)
    yield from group_count(plan.fault_tolerance, plan.groups)
    usable = None
    if plan.run_dir is not None:
        found = list(run_directory(plan.run_dir, plan.nodes_per_group * plan.groups))
        yield from found
        if found[0].verdict != "error":
            usable = plan.run_dir
            yield from lighthouse(plan.fault_tolerance.lighthouse or published_address(usable))
    if not plan.here:
        return
    nodes = plan.groups * plan.nodes_per_group
    yield from network(plan.host, nodes)
    yield from ports(plan.host)
    yield from limits(nodes)
    if complaint := node.complaint(usable, plan.host):
        yield Line("node", "error", complaint, "make room or mend it, or train on another node")
    state = _estimate(plan)
    yield from config_and_model(state)
    if "error" not in state:
        yield from memory(plan, state["state_bytes"], psutil.virtual_memory().available, state["device_bytes"])
        if plan.snapshot.enable:
            yield from snapshots(plan, state["state_bytes"], memory_of(Path(plan.snapshot.segment_dir)))
    if plan.measure_s and usable is not None:
        name = f"{os.environ.get('SLURMD_NODENAME') or socket.gethostname()}"
        found = links.measure_others(usable / PROBES, name, plan.host, plan.measure_s, nodes)
        yield from network_measured(plan, found, links.heartbeat_jitter_s(), state)


def _installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def versions(requirements: Sequence[str], installed: Any) -> Iterator[Line]:
    """The packages that Everstep requires; `installed` gives a package's version or None."""
    wrong = []
    for text in requirements:
        requirement = Requirement(text)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        version = installed(requirement.name)
        if version is None:
            wrong.append(f"{requirement.name} is missing, {requirement.specifier or 'any version'} is needed")
        elif not requirement.specifier.contains(version, prereleases=True):
            wrong.append(f"{requirement.name} is {version}, {requirement.specifier} is needed")
    if wrong:
        yield Line("versions", "error", "; ".join(wrong), "pip install everstep in this environment")
    else:
        python = ".".join(map(str, sys.version_info[:3]))
        yield Line("versions", "ok", ", ".join([f"Python {python}", *(f"{name} {installed(name)}" for name in OURS)]))


def timeouts(ft: FaultTolerance) -> Iterator[Line]:
    """Whether each wait of the protocol is shorter than those that contain it."""
    problems = [problem.message for problem in timeout_problems(ft)]
    for problem in problems:
        yield Line("timeouts", "error", problem, "change one of the two, in [fault_tolerance]")
    if ft.heartbeat_timeout_s < SHORTEST_HEARTBEAT_TIMEOUT_S:
        yield Line(
            "timeouts",
            "warning",
            f"heartbeat_timeout_s = {ft.heartbeat_timeout_s:g}: a busy host would be taken for a dead one",
            f"set it to {SHORTEST_HEARTBEAT_TIMEOUT_S:g} or more",
        )
    if not problems:
        order = ("heartbeat", "connect", "reduce", "join", "heal", "quorum", "stall", "startup")
        waits = ", ".join(f"{name} {getattr(ft, name + '_timeout_s'):g}" for name in order)
        yield Line("timeouts", "ok", f"{waits} s: each shorter than the waits around it")


def group_count(ft: FaultTolerance, groups: int) -> Iterator[Line]:
    """What the number of groups lets the run survive."""
    if ft.min_groups > groups:
        advice = "lower [fault_tolerance] min_groups or start more groups"
        yield Line("groups", "error", f"min_groups = {ft.min_groups}, and there are only {groups}", advice)
    elif groups == 1:
        yield Line("groups", "warning", "1: nobody holds the state while it restarts", "use 2, better 3 or more")
    elif ft.min_groups == groups:
        found = f"min_groups = groups = {groups}: every step waits until all are there"
        yield Line("groups", "warning", found, "lower min_groups to go on while a group restarts")
    elif groups < HANG_TOLERANT_GROUPS:
        yield Line(
            "groups",
            "warning",
            f"{groups}: a quorum takes more than half of the groups that still send heartbeats, so one that hangs "
            f"stops the other for stall_timeout_s = {ft.stall_timeout_s:g}",
            f"use {HANG_TOLERANT_GROUPS} or more; deaths are survived as it is",
        )
    else:
        yield Line("groups", "ok", f"{groups}: dead ones and hanging ones are survived, down to {ft.min_groups}")


def run_directory(run_dir: Path, nodes: int) -> Iterator[Line]:
    """Whether it takes writes, who else wrote there, and how its clock differs from ours."""
    name, nonce = os.environ.get("SLURMD_NODENAME") or socket.gethostname(), uuid.uuid4().hex
    probe = run_dir / PROBES / f"{name}.json"
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        require_own(run_dir)
        begin = time.time()
        write_json(probe, {"node": name, "nonce": nonce, "t": begin})
        end = time.time()
        written, same = probe.stat().st_mtime, read_json(probe).get("nonce") == nonce
    except OSError as error:
        yield Line("run directory", "error", f"{run_dir}: {error.strerror}", "give another --run-dir, or mend it")
        return
    except ValueError as error:
        yield Line("run directory", "error", str(error), "what others can write to is not acted on")
        return
    if not same:
        found = f"{run_dir} does not give back what was written"
        yield Line("run directory", "error", found, "the file system caches too much: use another one")
    if nodes > 1 and "SLURM_JOB_ID" in os.environ and shared_lag_s(run_dir) == 0:
        yield Line(
            "run directory",
            "warning",
            f"{run_dir} is on a file system of this machine alone",
            "unless all groups run here, give one that all nodes share",
        )
    yield from _shared(run_dir, sorted(path.stem for path in probe.parent.glob("*.json")), nodes)
    yield from clock_skew(max(begin - written, written - end, 0.0))


def _shared(run_dir: Path, writers: Sequence[str], nodes: int) -> Iterator[Line]:
    found = f"{run_dir} is writable; so far from {', '.join(writers)}"
    if nodes > 1 and len(writers) < 2:
        advice = "on several machines, run this on each (srun everstep doctor …): all must be named here"
        yield Line("run directory", "ok", found, advice)
    else:
        yield Line("run directory", "ok", found)


def clock_skew(skew_s: float) -> Iterator[Line]:
    """How far this machine's clock is from the run directory's."""
    found = f"{skew_s:.2f} s between this machine and the run directory"
    advice = "let NTP or chrony set the clocks of all nodes and of the file server"
    if skew_s > SKEW_ERROR_S:
        yield Line("clock", "error", f"{found}; a live group would be taken for a silent one", advice)
    elif skew_s > SKEW_WARNING_S:
        yield Line("clock", "warning", f"{found}; reports put events of different nodes in the wrong order", advice)
    else:
        yield Line("clock", "ok", found)


def lighthouse(address: str) -> Iterator[Line]:
    """Whether the lighthouse answers, if there is one yet."""
    if not address:
        yield Line("lighthouse", "ok", "none has published an address yet; groups wait for it")
    elif answers(address):
        yield Line("lighthouse", "ok", f"{address} answers")
    else:
        yield Line(
            "lighthouse",
            "warning",
            f"{address} does not answer",
            "if the run is going on, look at its lighthouse and at firewalls between here and there",
        )


def network(host: str, nodes: int) -> Iterator[Line]:
    """The interface that heal transfers and gradient sums will use: the one that `host` is an address of."""
    try:
        addresses = {str(info[4][0]) for info in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except OSError as error:
        advice = "enter it in DNS or /etc/hosts, or set [fault_tolerance] bind_host to an address"
        yield Line("network", "error", f"{host} cannot be resolved: {error.strerror}", advice)
        return
    own = {
        address.address.partition("%")[0]: name
        for name, known in psutil.net_if_addrs().items()
        for address in known
        if address.family in (socket.AF_INET, socket.AF_INET6)
    }
    yield from interface(host, addresses, own, {n: s.speed for n, s in psutil.net_if_stats().items()}, nodes)


def interface(
    host: str, addresses: set[str], own: Mapping[str, str], speeds: Mapping[str, int], nodes: int
) -> Iterator[Line]:
    """`own`: this machine's addresses and the interfaces they belong to. `speeds` in Mbit/s, 0 for unknown."""
    chosen = sorted({own[address] for address in addresses if address in own})
    places = ", ".join(sorted(addresses))
    advice = "set [fault_tolerance] bind_host, or --host, to an address that the other nodes reach"
    if not chosen:
        yield Line("network", "error", f"{host} is {places}, which is no address of this machine", advice)
    elif nodes > 1 and all(_is_loopback(address) for address in addresses):
        found = f"{host} is {places}: only processes on this machine reach it"
        yield Line("network", "warning", found, f"{advice}, unless all groups run here")
    else:
        speed = max(speeds.get(name, 0) for name in chosen)
        rate = f", {speed / 1000:g} Gbit/s" if speed else ""
        yield Line("network", "ok", f"{host} is {places} on {', '.join(chosen)}{rate}: heals and sums go through it")


def ports(host: str) -> Iterator[Line]:
    """Whether a port for the lighthouse and the groups' servers can be had."""
    try:
        port = free_port(host)
    except LaunchError as error:
        yield Line("ports", "error", str(error), "end what holds them, or give another host")
    except OSError as error:
        yield Line("ports", "error", f"{host}: {error.strerror}", "give a host that is this machine's")
    else:
        yield Line("ports", "ok", f"{port} and others between {PORTS.start} and {PORTS.stop} are free on {host}")


def limits(nodes: int) -> Iterator[Line]:
    """What the shell allows a process: open files above all, of which every group is several connections."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    processes, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    needed = FEWEST_FILES + FILES_FOR_A_NODE * nodes
    few = [f"{files} open files (ulimit -n), {needed} are needed"] if 0 <= files < needed else []
    if 0 <= processes < FEWEST_PROCESSES:
        few.append(f"{processes} processes (ulimit -u), {FEWEST_PROCESSES} are needed")
    if few:
        yield Line("limits", "error", "; ".join(few), "raise them, in the shell or in /etc/security/limits.conf")
    else:
        yield Line("limits", "ok", f"{'any number of' if files < 0 else files} open files")


def memory(plan: Plan, state_bytes: int, available: int, devices: Sequence[int]) -> Iterator[Line]:
    """Whether parameters and optimizer states of the groups that run here have room where they are kept."""
    ranks_here = max(1, plan.ranks_per_group // plan.nodes_per_group)
    share = state_bytes / max(1, plan.ranks_per_group)
    if devices:
        room, where, need = min(devices), "on each GPU", share
    else:
        groups_here = plan.groups if plan.nodes_per_group == 1 and "SLURM_JOB_ID" not in os.environ else 1
        room, where, need = available, "in host memory", share * ranks_here * groups_here
    found = f"{_gb(need)} of parameters and optimizer states {where}, of {_gb(room)}"
    advice = "more ranks in a group (--ranks-per-group with data_parallel_shard_degree), or a smaller model"
    yield Line("memory", "error" if need > room else "ok", found, advice if need > room else "")


def network_measured(
    plan: Plan, found: Sequence[links.Link], jitter_s: float, state: Mapping[str, Any]
) -> Iterator[Line]:
    """The way to the other hosts, and the timeouts that fit it."""
    if not found:
        advice = "run this on all nodes at once: srun everstep doctor … --measure-s 30"
        yield Line("links", "warning", "no other host measured at the same time", advice)
        return
    for link in found:
        if link.error:
            yield Line("links", "error", f"{link.name}: {link.error}", "open the ports between the nodes")
        else:
            yield Line(
                "links",
                "ok",
                f"{link.name}: {link.rtt_s * 1e3:.2f} ms there and back (worst {link.worst_rtt_s * 1e3:.2f}), "
                f"{link.bytes_per_s * 8 / 1e9:.2f} Gbit/s",
            )
    yield Line("heartbeats", "ok", f"late by {jitter_s * 1e3:.1f} ms at worst on this host")
    gradients = state.get("parameters", 0) * 4 / max(1, plan.ranks_per_group)
    proposed = links.propose(found, jitter_s, gradients, state.get("state_bytes", 0) / max(1, plan.ranks_per_group))
    ft = plan.fault_tolerance
    for name, least in asdict(proposed).items():
        has = getattr(ft, name)
        verdict: Verdict = "warning" if has < least else "ok"
        advice = f"set [fault_tolerance] {name} = {least:g}" if has < least else ""
        yield Line("timeouts", verdict, f"{name} = {has:g}, {least:g} fits what was measured", advice)


def _is_loopback(address: str) -> bool:
    return address == "::1" or address.startswith("127.")


def _estimate(plan: Plan) -> dict:
    """What `everstep.launch.estimate` says."""
    flags = ["--fault_tolerance.groups", str(plan.groups), *plan.flags]
    order = json.dumps([str(plan.config), flags, plan.ranks_per_group, plan.allow_dropped])
    command = [sys.executable, "-m", "everstep.launch.estimate", order]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=ESTIMATE_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return {"error": f"torchtitan was not imported within {ESTIMATE_TIMEOUT_S:g} s"}
    if done.returncode:
        return {"error": (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]}
    return json.loads(done.stdout.splitlines()[-1])


def config_and_model(state: Mapping[str, Any]) -> Iterator[Line]:
    """Whether torchtitan takes the config, and how large its model is."""
    if "error" in state:
        yield Line("config", "error", str(state["error"]), "change the file, or the flag")
    else:
        count, size = state["parameters"], state["state_bytes"]
        yield Line("config", "ok", f"{count / 1e6:,.1f} M parameters, {_gb(size)} of state in each group")
        for warning in state.get("warnings", ()):
            yield Line("config", "warning", warning)
        if state.get("attention"):
            yield attention(*state["attention"])


def attention(coverage: str, missing: Sequence[str]) -> Line:
    """Whether `[attention_check]` sees all of the model's attention."""
    found = f"{coverage} linear layers and kernels are checked"
    if not missing:
        return Line("attention", "ok", found)
    advice = "set [attention_check] enable = false: a model that is checked in part does not start"
    return Line("attention", "error", f"{found}; {', '.join(missing)} would not be", advice)


def memory_of(segment_dir: Path) -> SimpleNamespace:
    """`available` host memory and `tmpfs` free in the segment's file system, bytes; tmpfs None if it is not there."""
    try:
        tmpfs: int | None = psutil.disk_usage(str(segment_dir)).free
    except OSError:
        tmpfs = None
    return SimpleNamespace(available=psutil.virtual_memory().available, tmpfs=tmpfs)


def snapshot_bytes(state_bytes: int, groups: int, parity: int, scope: str, parity_group: int = 8) -> int:
    """Host memory that one group's part takes: two buffers, two parities. docs/snapshots.md has the formula."""
    if scope == "full":
        return 2 * state_bytes
    together = len(stripes.parity_group(range(groups), parity_group, 0))
    lost = stripes.effective_parity(together, parity)
    share = 2 * state_bytes / groups
    return int(share * (1 + lost / (together - lost)))


def snapshots(plan: Plan, state_bytes: int, memory: SimpleNamespace) -> Iterator[Line]:
    """Whether the snapshots of the groups that run here have room, also when a group is lost and theirs grow."""
    groups_here = plan.groups if plan.nodes_per_group == 1 and "SLURM_JOB_ID" not in os.environ else 1
    need, grown = (
        groups_here * snapshot_bytes(
            state_bytes, groups, plan.snapshot.parity, plan.snapshot.scope, plan.snapshot.parity_group
        )
        // plan.nodes_per_group
        for groups in (plan.groups, max(plan.groups - 1, 1))
    )  # fmt: skip
    reserve = int(plan.snapshot.memory_reserve_gb * 1e9)
    directory = plan.snapshot.segment_dir
    if memory.tmpfs is None:
        advice = "set [snapshot] segment_dir to a tmpfs"
        yield Line("snapshots", "error", f"{directory} is not there", advice)
        return
    who = f"{groups_here} groups" if groups_here > 1 else "a group"
    found = f"{_gb(need)} on this machine for {who} ({_gb(grown)} with a group lost)"
    have = f"{_gb(memory.tmpfs)} are free in {directory}, {_gb(memory.available)} in host memory"
    room = min(memory.tmpfs, memory.available - reserve)
    advice = "a larger tmpfs (mount -o remount,size=…, docker --shm-size), more nodes in a group or more groups"
    verdict: Verdict = "error" if need > room else "warning" if grown > room else "ok"
    yield Line("snapshots", verdict, f"{found}; {have}", "" if verdict == "ok" else advice)


def _gb(size: float) -> str:
    return f"{size / 1e9:.2f} GB" if size >= 1e7 else f"{size / 1e6:.2f} MB"


def show(lines: Sequence[Line]) -> str:
    """One line each, with what to do below."""
    text = []
    for line in lines:
        text.append(f"{line.verdict:<8} {line.check}: {line.found}")
        if line.advice:
            text.append(f"{'':<8} → {line.advice}")
    return "\n".join(text)


def to_json(lines: Sequence[Line]) -> dict:
    """{"ok": whether nothing is an error, "checks": [...]}."""
    return {"ok": not broken(lines), "checks": [asdict(line) for line in lines]}


def broken(lines: Sequence[Line]) -> bool:
    """Whether the run should not be started like this."""
    return any(line.verdict == "error" for line in lines)
