"""Is this node fit to train on? A few things that break on single nodes and that a trainer would only meet later.

An agent looks at storage before each start of its workers; `everstep doctor --node` looks at GPUs as well. torch is
imported only where there is a GPU to look at.
"""

import os
import shutil
import tempfile
from pathlib import Path

from everstep.launch.scarce import is_scarce

SHARED_MEMORY = Path("/dev/shm")
SMALLEST_FREE_BYTES = 64 << 20
GPU_FILES = Path("/dev")
SIZE, TRIALS = 256, 3


def complaint(run_dir: Path | None) -> str:
    """What is wrong with this node; "" if nothing is."""
    return storage_complaint(run_dir) or gpu_complaint()


def storage_complaint(run_dir: Path | None) -> str:
    """Whether the run directory, if there is one, or a local temporary folder takes no write, or shared memory has too
    little room for what a trainer's processes exchange. Raises OSError if the run directory is full, which is no fault
    of this node's."""
    for folder in [*([run_dir / "state"] if run_dir is not None else []), Path(tempfile.gettempdir())]:
        try:
            _write(folder)
        except OSError as error:
            if run_dir is not None and folder.is_relative_to(run_dir) and is_scarce(error):
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


def gpu_complaint() -> str:
    """Whether PyTorch cannot use a GPU that is there, or one gives a wrong product."""
    if not any(GPU_FILES.glob("nvidia[0-9]*")):
        return ""
    import torch

    if not torch.accelerator.is_available():
        return "there are GPUs, and PyTorch cannot use them"
    devices = [
        f"{torch.accelerator.current_accelerator()}:{index}" for index in range(torch.accelerator.device_count())
    ]
    return next(filter(None, map(gemm_complaint, devices)), "")


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
