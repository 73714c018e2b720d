"""How states reach joiners, as the step protocol sees it: serving one's own, fetching another's in the background."""

import threading
import time
from datetime import timedelta

from everstep.quorum.heal import HealError, HealServer, HealState, fetch

GATE_TIMEOUT = timedelta(seconds=300)


class Door:
    """Implements `everstep.step.interfaces.HealDoor` for one rank.

    Args:
        host: address to listen on and to be reached under.
        token: of the run.
        timeout: longest silence of the other side.
    """

    def __init__(self, host: str, token: bytes, timeout: timedelta) -> None:
        self._server = HealServer(host, token, timeout)
        self._token, self._timeout = token, timeout
        self._serves: tuple[int, int] | None = None
        self.address = self._server.address

    def serve(self, step: int, history: int, state: HealState) -> None:
        """See `HealDoor.serve`."""
        if self._serves != (step, history):
            self._serves = (step, history)
            state.meta["history"] = history
            self._server.serve(step, state)

    def close(self) -> None:
        """See `HealDoor.close`."""
        if self._serves is not None:
            self._serves = None
            self._server.close_gate(GATE_TIMEOUT)

    def fetch(self, address: str, step: int, history: int) -> "StateFetch":
        """See `HealDoor.fetch`."""
        return StateFetch(address, self._token, step, history, self._timeout)

    def shutdown(self) -> None:
        """Cut every reader off and stop listening."""
        self._server.shutdown()


class StateFetch:
    """Implements `everstep.step.interfaces.Fetch`: a thread of its own receives the state."""

    def __init__(self, address: str, token: bytes, step: int, history: int, timeout: timedelta) -> None:
        self._source = (address, token, step, history, timeout)
        self._state: HealState | None = None
        self.error = ""
        self.took_s = 0.0
        self.nbytes = 0
        self._thread = threading.Thread(target=self._receive, name="heal", daemon=True)
        self._thread.start()

    def _receive(self) -> None:
        begun = time.monotonic()
        address, token, step, history, timeout = self._source
        try:
            state = fetch(address, token, step, None, timeout)
            if state.meta.get("history") != history:
                raise HealError(f"{address} has step {step} of another history")
        except HealError as error:
            self.error = str(error)
            return
        self.took_s = time.monotonic() - begun
        self.nbytes = sum(tensor.numel() * tensor.element_size() for tensor in state.tensors.values())
        self._state = state

    def state(self) -> HealState | None:
        """See `Fetch.state`."""
        return self._state

    def cancel(self) -> None:
        """See `Fetch.cancel`: what still arrives is not used."""
        self._state = None
