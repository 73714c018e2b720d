"""How a group speaks to the lighthouse: through its gate, or to a torchft lighthouse that somebody else started."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import asdict
from datetime import timedelta
from typing import Any, Protocol
from urllib.parse import urlsplit

from torchft.coordination import LighthouseClient

from everstep import wire
from everstep.quorum.gate import PURPOSE, Asked

HELLO_TIMEOUT = timedelta(seconds=1)
"""A gate says its name at once; who has not by then is asked as torchft's lighthouse."""
Told = tuple[int, list[tuple[Any, Any]]]
"""A quorum's id, and of each member its replica id and what it says."""


class LighthouseError(RuntimeError):
    """The lighthouse is not there, refuses, or had no quorum in time."""


class Line(Protocol):
    """A connection to a lighthouse, for one thread."""

    def beat(self, replica: str, timeout: timedelta) -> None:
        """Say that the replica lives."""
        ...

    def quorum(self, replica: str, store: str, step: int, data: dict[str, str], timeout: timedelta) -> Told:
        """Ask for the next quorum."""
        ...

    def close(self) -> None: ...


class GateLine:
    """A `Line` through the gate (`everstep.quorum.gate`)."""

    def __init__(self, address: str, token: bytes, timeout: timedelta) -> None:
        # Encrypted if the gate says so, which proves with the token that it does.
        self._channel = wire.connect(address, token, timeout, purpose=PURPOSE, encrypt=None)

    def beat(self, replica: str, timeout: timedelta) -> None:
        self._channel.set_timeout(timeout)
        self._channel.ask({"op": "beat", "replica": replica})

    def quorum(self, replica: str, store: str, step: int, data: dict[str, str], timeout: timedelta) -> Told:
        self._channel.set_timeout(timeout)
        # A little less than our own patience, so that the reason arrives before we give up.
        asked = Asked("quorum", replica, store, step, max(0.001, 0.95 * timeout.total_seconds()), data)
        answer = self._channel.ask(asdict(asked))
        if "failed" in answer:
            raise LighthouseError(str(answer["failed"]))
        try:
            return int(answer["quorum_id"]), [(member, said) for member, said in answer["members"]]
        except (KeyError, TypeError, ValueError) as error:
            raise LighthouseError(f"the gate of the lighthouse answered with something else: {error}") from error

    def close(self) -> None:
        self._channel.close()


class TorchftLine:
    """A `Line` to torchft's own lighthouse, which lets everybody in."""

    def __init__(self, address: str, timeout: timedelta) -> None:
        self._client = LighthouseClient(address, timeout)

    def beat(self, replica: str, timeout: timedelta) -> None:
        self._client.heartbeat(replica, timeout=timeout)

    def quorum(self, replica: str, store: str, step: int, data: dict[str, str], timeout: timedelta) -> Told:
        said: dict[Any, object] = dict(data)
        quorum = self._client.quorum(
            replica_id=replica, timeout=timeout, store_address=store, step=step, world_size=1, data=said
        )
        return int(quorum.quorum_id), [(member.replica_id, member.data or {}) for member in quorum.participants]

    def close(self) -> None:
        pass


class Voice:
    """One thread's line to the lighthouse, wherever that is now; made anew after every failure."""

    def __init__(self, token: bytes, replica: str, connect_timeout: timedelta, gated: Callable[[], bool]) -> None:
        """`gated`: whether the lighthouse is the run's own, so that one without a gate is somebody else's."""
        self._token, self._replica, self._connect_timeout = token, replica, connect_timeout
        self._gated = gated
        self._ungated = ""
        """Address of a lighthouse that has answered as torchft's, so that it is not waited for again."""
        self._address = ""
        self._line: Line | None = None

    def beat(self, address: str) -> None:
        """Raises LighthouseError."""
        with self._speaking(address, self._connect_timeout) as line:
            line.beat(self._replica, self._connect_timeout)

    def quorum(self, address: str, store: str, step: int, data: dict[str, str], timeout: timedelta) -> Told:
        """Raises LighthouseError."""
        with self._speaking(address, min(timeout, self._connect_timeout)) as line:
            return line.quorum(self._replica, store, step, data, timeout)

    @contextlib.contextmanager
    def _speaking(self, address: str, timeout: timedelta) -> Iterator[Line]:
        line = self._line if address == self._address else None
        try:
            if line is None:
                line = self._line = self._open(address, timeout)
                self._address = address
            yield line
            if isinstance(line, TorchftLine):
                self._ungated = address
        except Exception as error:  # the Rust client raises several unrelated types
            if line is not None:
                line.close()
            self._line = None
            raise LighthouseError(str(error).partition("\n")[0][:300] or type(error).__name__) from error

    def _open(self, address: str, timeout: timedelta) -> Line:
        place = urlsplit(address)
        at = wire.format_address(place.hostname or "", place.port or 0)
        gated = self._gated()
        if (gated or address != self._ungated) and wire.answers(at, min(timeout, HELLO_TIMEOUT)):
            return GateLine(at, self._token, timeout)
        if gated:
            # Whoever took the port of one that died could tell each group another quorum, made of what all of them say.
            raise LighthouseError(f"{at} does not answer as this run's lighthouse does")
        return TorchftLine(address, timeout)
