"""Is this node fit to train on? `everstep doctor --node`, and every agent of a batch job before its workers start.

Beside what `health` looks at before each start of workers: the GPUs are there and compute right, the network card is
up, the clock agrees with the file server's. torch is imported only where there is a GPU to look at.
"""

import os
import tempfile
import time
from pathlib import Path

import psutil

from everstep.launch import health
from everstep.run.fence import LEASE_S

GPU_FILES = Path("/dev")
SIZE, TRIALS = 256, 3
LOOPBACK = "lo"


def complaint(run_dir: Path | None, host: str = "", gpus: int | None = None) -> str:
    """What is wrong with this node; "" if nothing is.

    gpus: how many the ranks here need; None: as many as there are.
    """
    return (
        health.complaint(run_dir)
        or (clock_complaint(run_dir) if run_dir is not None else "")
        or network_complaint(host)
        or gpu_complaint(gpus)
    )


def clock_complaint(run_dir: Path) -> str:
    """How far this clock is from the file server's, if that is too far."""
    begin = time.time()
    with tempfile.NamedTemporaryFile(dir=run_dir / "state", prefix=".clock-") as probe:
        end, written = time.time(), os.fstat(probe.fileno()).st_mtime
    skew_s = max(begin - written, written - end, 0.0)
    return f"its clock is {skew_s:.1f} s from the file server's" if skew_s > LEASE_S else ""


def network_complaint(host: str) -> str:
    """Whether no network card is up, where others have to reach this node."""
    if host in ("localhost", "127.0.0.1", "::1"):
        return ""
    up = [name for name, card in psutil.net_if_stats().items() if card.isup and name != LOOPBACK]
    return "" if up else "no network card is up"


def gpu_complaint(needed: int | None) -> str:
    """Whether GPUs are missing, or one gives a wrong product."""
    if not any(GPU_FILES.glob("nvidia[0-9]*")):
        return f"{needed} GPUs are needed and none is visible" if needed else ""
    import torch

    if not torch.cuda.is_available():
        return "there are GPUs, and CUDA cannot use them"
    found = torch.cuda.device_count()
    if needed is not None and found < needed:
        return f"{needed} GPUs are needed and {found} visible"
    for index in range(found):
        if wrong := gemm_complaint(f"cuda:{index}"):
            return wrong
    return ""


def gemm_complaint(device: str) -> str:
    """Whether `device` multiplies matrices of small whole numbers wrongly: their products are exact in every format."""
    import torch

    generator = torch.Generator().manual_seed(0)
    for _ in range(TRIALS):
        left, right = (torch.randint(-1, 2, (SIZE, SIZE), generator=generator) for _ in range(2))
        exact = left @ right
        for dtype in (torch.float32, torch.bfloat16):
            try:
                product = (left.to(device, dtype) @ right.to(device, dtype)).cpu().long()
            except RuntimeError as error:
                return f"{device} cannot compute: {str(error).splitlines()[0]}"
            if not torch.equal(product, exact):
                wrong = int((product != exact).sum())
                return f"{device} computes wrongly: {wrong} of {SIZE * SIZE} elements of a product in {dtype}"
    return ""
