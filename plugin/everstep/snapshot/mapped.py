"""A buffer's memory as a tensor, page-locked where copies come from a device."""

from typing import Any

import torch

from everstep.snapshot.buffer import BufferWriter, SnapshotError


def _cuda_runtime() -> Any:
    return torch.cuda.cudart()


class MappedBuffer:
    """A buffer's memory as a tensor, registered with CUDA where copies come from a device."""

    def __init__(self, writer: BufferWriter) -> None:
        self.writer = writer
        self._registered: int | None = None
        self._tensor: torch.Tensor | None = None

    def reserve(self, size: int, device: torch.device | None) -> None:
        if size > self.writer.capacity:
            self._unregister()  # before the mapping goes
            self._tensor = None
        if self.writer.reserve(size) or self._tensor is None or len(self._tensor) < size:
            self._unregister()
            self._tensor = torch.frombuffer(self.writer.payload(self.writer.capacity), dtype=torch.uint8)
        if device is not None and self._registered is None:
            address, length = self.writer.address
            # Page-locked for this process: device copies are asynchronous only into such memory. On the rank's own
            # device: in a thread that has none yet, the call would open a context on the first.
            with torch.cuda.device(device):
                code = int(_cuda_runtime().cudaHostRegister(address, length, 0))
            if code:
                raise SnapshotError(f"{self.writer.path}: cudaHostRegister of {length} bytes failed with error {code}")
            self._registered = address

    def payload(self) -> torch.Tensor:
        assert self._tensor is not None
        return self._tensor

    def _unregister(self) -> None:
        if self._registered is not None:
            _cuda_runtime().cudaHostUnregister(self._registered)
            self._registered = None

    def release(self) -> None:
        self._unregister()
        self._tensor = None
        self.writer.release()
