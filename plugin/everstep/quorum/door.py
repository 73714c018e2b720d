"""How states reach joiners, as the step protocol sees it: serving one's own, fetching another's in the background."""

import threading
import time
from contextlib import AbstractContextManager
from datetime import timedelta

from everstep.quorum import memory
from everstep.quorum.heal import Fetch, HealError, HealServer, HealState, Whose


class Door:
    """Implements `everstep.step.interfaces.HealDoor` for one rank.

    Args:
        host: address to listen on and to be reached under.
        token: of the run.
        timeout: longest silence of the other side.
        whose: which state is served here and wanted from others.
        encrypt: fault_tolerance.encrypt.
    """

    def __init__(
        self, host: str, token: bytes, timeout: timedelta, whose: Whose | None = None, encrypt: bool = False
    ) -> None:
        whose = whose or Whose()
        self._server = HealServer(host, token, timeout, whose=whose, encrypt=encrypt)
        self._token, self._timeout, self._whose, self._encrypt = token, timeout, whose, encrypt
        self._serves: tuple[int, int] | None = None
        self._last: StateFetch | None = None
        self.address = self._server.address

    def serve(self, step: int, history: int, state: HealState) -> None:
        """See `HealDoor.serve`."""
        if self._serves != (step, history):
            self._serves = (step, history)
            state.meta["history"] = history
            self._server.serve(step, state, history)

    def close(self) -> None:
        """See `HealDoor.close`."""
        if self._serves is not None:
            self._serves = None
            self._server.release()

    def fetch(self, address: str, step: int, history: int) -> "StateFetch":
        """See `HealDoor.fetch`. What an attempt for the same state that broke off had received is not asked for
        again."""
        transfer = self._last.rest(step, history) if self._last is not None else None
        if transfer is None:
            transfer = Fetch(self._token, step, history=history, whose=self._whose, encrypt=self._encrypt)
        self._last = StateFetch(address, transfer, self._timeout)
        return self._last

    def shutdown(self) -> None:
        """Cut every reader off and stop listening."""
        self._server.shutdown()


class StateFetch:
    """Implements `everstep.step.interfaces.Fetch`: a thread of its own receives the state."""

    def __init__(self, address: str, transfer: Fetch, timeout: timedelta) -> None:
        self._address, self._transfer, self._timeout = address, transfer, timeout
        self._state: HealState | None = None
        self.error = ""
        self.took_s = 0.0
        self.nbytes = 0
        self._thread = threading.Thread(target=self._receive, name="heal", daemon=True)
        self._thread.start()

    def _receive(self) -> None:
        begun = time.monotonic()
        try:
            state = self._transfer.run(self._address, self._timeout)
        except HealError as error:
            self.error = str(error)
            return
        self.took_s = time.monotonic() - begun
        self.nbytes = sum(tensor.numel() * tensor.element_size() for tensor in state.tensors.values())
        self._state = state

    def rest(self, step: int, history: int) -> Fetch | None:
        """The transfer, if it broke off and was of this state."""
        same = (self._transfer.step, self._transfer.history) == (step, history)
        return self._transfer if same and self.error and not self._thread.is_alive() else None

    def state(self) -> HealState | None:
        """See `Fetch.state`."""
        return self._state

    def room(self) -> AbstractContextManager[bool]:
        """See `Fetch.room`. The sums of a step are never larger than the state."""
        return memory.claimed(self._transfer.nbytes)

    def cancel(self) -> None:
        """See `Fetch.cancel`: what still arrives is not used."""
        self._state = None
