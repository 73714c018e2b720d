"""The resources of the machine that a run needs: ports, devices, cores, storage."""

import errno
import os
import random
import shutil
import socket
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from everstep.launch.restart_rules import is_shortage
from everstep.run.directory import LaunchError

HOST = "127.0.0.1"
"""Address of the servers of a run on one machine."""
PORTS = range(20_000, 32_000)
"""Ports for the lighthouse. They are below those of Linux's outgoing connections, so a restart gets its port back."""
VISIBLE = "CUDA_VISIBLE_DEVICES"
"""Environment variable: numbers or names of the GPUs that a process sees, separated by commas; empty: none."""
LOOK_ONLY = "PYTORCH_NVML_BASED_CUDA_CHECK"
"""Environment variable: with "1" PyTorch does not initialise a GPU to find out whether there is one, so that a process
forked later can still use the GPU."""
SHARED_MEMORY = Path("/dev/shm")
SMALLEST_FREE_BYTES = 64 << 20


def visible_devices(found: int) -> list[str]:
    """Return the names, as in VISIBLE, of the `found` GPUs that this process sees."""
    names = os.environ.get(VISIBLE, "")
    return names.split(",")[:found] if names else [str(index) for index in range(found)]


def devices_of_group(visible: Sequence[str], group: int, ranks: int) -> str | None:
    """Return the GPUs for the `ranks` ranks of a group, as in VISIBLE: the next unused ones, or, if they are
    used up, those of other groups again from the first on. None, which means inherited, if this machine has none."""
    if not visible:
        return None
    return ",".join(visible[(group * ranks + rank) % len(visible)] for rank in range(ranks))


def sharing_complaint(visible: Sequence[str], ranks: int, process_group: str) -> str:
    """Return why a run of `ranks` ranks, all groups together, cannot sum over NCCL on this machine's GPUs, or "". NCCL
    accepts two ranks of a communicator on one GPU only if an environment variable allows it (NCCL 2.30, init.cc)."""
    if process_group != "nccl" or not visible or ranks <= len(visible):
        return ""
    if os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1":
        return ""
    return (
        f"{ranks} ranks would share {len(visible)} GPU(s), and NCCL refuses two ranks on one GPU: give fewer --groups, "
        'set [fault_tolerance] process_group = "gloo", or, with NCCL 2.30 or later, NCCL_MULTI_RANK_GPU_ENABLE=1'
    )


def limited_threads(ranks: int, threads: str = "") -> dict[str, str]:
    """Return environment variables that share this machine's cores among its `ranks` workers, or give each of these
    `threads`; {} if OMP_NUM_THREADS is set already. If thread pools outnumber the cores, ranks slow each other down
    tenfold. torchrun sets it too. A process forked after torch had been imported must call `follow_threads`."""
    if os.environ.get("OMP_NUM_THREADS", "") not in ("", "0"):  # these two count as unset
        return {}
    return {"OMP_NUM_THREADS": threads or str(max(1, len(os.sched_getaffinity(0)) // ranks))}


def follow_threads() -> None:
    """Have torch use OMP_NUM_THREADS threads in a process that was forked after torch had read that variable."""
    if (torch := sys.modules.get("torch")) is not None and os.environ.get("OMP_NUM_THREADS", "").isdecimal():
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


def free_port(host: str = HOST) -> int:
    """Return a TCP port of PORTS that is free at `host` now; another process may take it before it is used. Raises
    LaunchError if none is free or `host` is no address of this machine, and OSError for a shortage."""
    for port in random.sample(PORTS, len(PORTS)):
        with socket.socket(_family(host)) as probe:
            try:
                probe.bind((host, port))
                return port
            except OSError as error:
                if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                    raise _cannot_bind(host, error) from None
    raise LaunchError(f"no free port between {PORTS.start} and {PORTS.stop} on {host}.")


def listen(host: str) -> socket.socket:
    """Return a socket that listens on a free port, only at the address `host`. Raises LaunchError if that is no address
    of this machine, and OSError for a shortage."""
    try:
        return socket.create_server((host, 0), family=_family(host), backlog=1024)
    except OSError as error:
        raise _cannot_bind(host, error) from None


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _cannot_bind(host: str, error: OSError) -> Exception:
    """Return `error` if it is a shortage, else a LaunchError that says what to do."""
    advice = "Give an address of this machine with --host or [fault_tolerance] bind_host."
    said = f"this machine cannot listen on {host}: {error.strerror}. {advice}"
    return error if is_shortage(error) else LaunchError(said)


def storage_complaint(run_dir: Path) -> str:
    """Return what is wrong with this node's storage, or "": the run directory or the local temporary folder cannot be
    written, or shared memory has too little room for what a trainer's processes exchange. A trainer would fail later
    because of it. Raises OSError if the run directory is full, which is not the node's fault."""
    try:
        folders = run_dir / "state", Path(tempfile.gettempdir())
    except FileNotFoundError as error:
        return f"there is no temporary folder: {error.strerror}"
    for folder in folders:
        try:
            why = why_not_writable(folder)
        except OSError as error:
            if folder.is_relative_to(run_dir):
                raise
            why = str(error.strerror)
        if why:
            return f"{folder} cannot be written: {why}"
    if SHARED_MEMORY.exists():
        free = shutil.disk_usage(SHARED_MEMORY).free
        if free < SMALLEST_FREE_BYTES:
            return f"{SHARED_MEMORY} has {free >> 20} MiB free, {SMALLEST_FREE_BYTES >> 20} are needed"
    return ""


def why_not_writable(folder: Path) -> str:
    """Return why no file can be written to a folder, which is made if it is missing; "" if one can. A read-only file
    system is such a reason. Raises OSError for other shortages, such as a full disk, as they may pass."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Others may write to the temporary folder, so use a random name that nobody can have made a link of.
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".fit-") as file:
            file.write(b"x" * 4096)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        if is_shortage(error) and error.errno != errno.EROFS:
            raise
        return str(error.strerror)
    return ""
