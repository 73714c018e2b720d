"""What a run takes from the machine it runs on: ports, devices, storage."""

import os
import random
import shutil
import socket
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from everstep.launch.scarce import is_scarce
from everstep.run.directory import LaunchError

HOST = "127.0.0.1"
PORTS = range(20_000, 32_000)
"""Below the ports of Linux's outgoing connections: the lighthouse must get its own back."""
SHARED_MEMORY = Path("/dev/shm")
SMALLEST_FREE_BYTES = 64 << 20


def devices_of_group(visible: Sequence[str], group: int, ranks: int) -> str | None:
    """What a group of so many ranks sees of GPUs (`devices.VISIBLE`): some of its own while they last, then shared from
    the first. None, as inherited, where there are none."""
    if not visible:
        return None
    return ",".join(visible[(group * ranks + rank) % len(visible)] for rank in range(ranks))


def sharing_complaint(visible: Sequence[str], ranks: int, process_group: str) -> str:
    """Why so many ranks cannot sum over NCCL on these GPUs, or nothing. It takes two ranks of a communicator on one GPU
    only if it is told to (NCCL 2.30, init.cc)."""
    if process_group != "nccl" or not visible or ranks <= len(visible):
        return ""
    if os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1":
        return ""
    return (
        f"{ranks} ranks would share {len(visible)} GPU(s), and NCCL refuses two ranks on one GPU: give fewer --groups, "
        'set [fault_tolerance] process_group = "gloo", or, with NCCL 2.30 or later, NCCL_MULTI_RANK_GPU_ENABLE=1'
    )


def limited_threads(ranks: int) -> dict[str, str]:
    """What shares this machine's cores among `ranks` processes, for their environment; nothing if OMP_NUM_THREADS is
    set already. Ranks whose thread pools outnumber the cores slow each other down tenfold. As torchrun does; a process
    that was forked after torch had been imported follows with `follow_threads`."""
    if os.environ.get("OMP_NUM_THREADS"):  # an empty one is none
        return {}
    return {"OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // ranks))}


def follow_threads() -> None:
    """Have torch compute with OMP_NUM_THREADS threads, in a process that was forked after torch had read it."""
    if (torch := sys.modules.get("torch")) is not None and os.environ.get("OMP_NUM_THREADS", "").isdecimal():
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


def free_port(host: str = HOST) -> int:
    """A TCP port of PORTS that nobody has now. Raises LaunchError when there is none."""
    for port in random.sample(PORTS, len(PORTS)):
        with socket.socket() as probe:
            try:
                probe.bind((host, port))
            except OSError:
                continue
            return port
    raise LaunchError(f"no free port between {PORTS.start} and {PORTS.stop} on {host}.")


def listen(host: str) -> socket.socket:
    """A socket that listens on a free port of `host` alone. Raises LaunchError if `host` is not this machine, and
    OSError if there is no room for it."""
    try:
        return socket.create_server((host, 0), backlog=1024)
    except OSError as error:
        if is_scarce(error):
            raise
        raise LaunchError(
            f"{host}: this machine cannot listen there: {error.strerror}. Give an address of its own with --host, or "
            "as [fault_tolerance] bind_host."
        ) from None


def storage_complaint(run_dir: Path) -> str:
    """Whether the run directory or a local temporary folder takes no write, or shared memory has too little room for
    what a trainer's processes exchange, all of which a trainer would only meet later; "" if nothing is wrong. Raises
    OSError if the run directory is full, which is no fault of this node's."""
    for folder in (run_dir / "state", Path(tempfile.gettempdir())):
        try:
            _write(folder)
        except OSError as error:
            if folder.is_relative_to(run_dir) and is_scarce(error):
                raise
            return f"{folder} cannot be written: {error.strerror}"
    if SHARED_MEMORY.exists():
        free = shutil.disk_usage(SHARED_MEMORY).free
        if free < SMALLEST_FREE_BYTES:
            return f"{SHARED_MEMORY} has {free >> 20} MiB free, {SMALLEST_FREE_BYTES >> 20} are needed"
    return ""


def _write(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    # Others may write to a temporary folder: a name that nobody can have put a link under.
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".fit-") as file:
        file.write(b"x" * 4096)
        file.flush()
        os.fsync(file.fileno())
