"""Does a lighthouse still answer? One that hangs keeps its port and its connections, so that only asking tells."""

import socket
import struct
import threading
import urllib.parse

PROBE_EVERY_S = 2.0
PROBE_TIMEOUT_S = 5.0
SILENT_PROBES = 2
STATUS, ALIVE = b"/everstep.Lighthouse/Status", b"everstep lighthouse"
"""The question that the gate of a lighthouse answers for anybody, and its answer (`everstep.quorum.gate`)."""
_DATA, _HEADERS, _SETTINGS = 0, 1, 4


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    """A frame of HTTP/2 (RFC 9113, section 4.1)."""
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def _question() -> bytes:
    """The only request of a connection: gRPC over HTTP/2, its headers as literals (RFC 7541, section 6.2.2)."""
    headers = ((b":method", b"POST"), (b":scheme", b"http"), (b":path", STATUS), (b":authority", b"lighthouse"))
    headers += ((b"content-type", b"application/grpc"), (b"te", b"trailers"))
    block = b"".join(b"\0" + bytes([len(name)]) + name + bytes([len(value)]) + value for name, value in headers)
    message = bytes(5)  # not compressed, empty
    return (
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
        + _frame(_SETTINGS, 0, 0, b"")
        + _frame(_HEADERS, 4, 1, block)
        + _frame(_DATA, 1, 1, message)
    )


def answers(address: str) -> bool:
    """Whether the lighthouse there (http://host:port) answers a question, as one that merely listens may not."""
    said = b""
    try:
        place = urllib.parse.urlsplit(address)
        with socket.create_connection((place.hostname or "", place.port or 0), PROBE_TIMEOUT_S) as connection:
            connection.sendall(_question())
            while ALIVE not in said and len(said) < 1 << 16 and (more := connection.recv(4096)):
                said += more
    except (OSError, ValueError):
        return False
    return ALIVE in said


class Probe:
    """Asks a lighthouse again and again, in a thread of its own: an answer that does not come holds nobody up."""

    def __init__(self, address: str):
        self.address = address
        self._silent = 0
        self._closed = threading.Event()
        threading.Thread(target=self._ask, name="lighthouse-probe", daemon=True).start()

    @property
    def hangs(self) -> bool:
        """Whether it has left several questions in a row without an answer."""
        return self._silent >= SILENT_PROBES

    def close(self) -> None:
        self._closed.set()

    def _ask(self) -> None:
        while not self._closed.wait(PROBE_EVERY_S):
            self._silent = 0 if answers(self.address) else self._silent + 1
