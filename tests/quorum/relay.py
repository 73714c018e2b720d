"""What stands between a joiner and its source, and a fetch in one go."""

import socket
import threading
from contextlib import contextmanager, suppress

from everstep import wire
from everstep.quorum.heal import Fetch, HealError, Wanted


def fetch(address, token, step, timeout, *, history=0, whose="", **of):
    """The state of a committed step, once it is here; see `Fetch`. Raises HealError."""
    wanted = Wanted(step, history, whose)
    found = Fetch(address, wanted, token, timeout, **of)
    found.join()
    if found.error:
        raise HealError(found.error)
    return found.state()


@contextmanager
def relay(address, change=lambda data, total: data):
    """A TCP proxy: yields its address and what passed it. `change(data, total)`: of what the source sends after `total`
    bytes; None cuts the connection."""
    listener = socket.create_server(("127.0.0.1", 0))
    seen, sockets, lock, passed = bytearray(), [listener], threading.Lock(), [0]

    def pump(source, sink, change):
        with suppress(OSError):
            while data := source.recv(1 << 16):
                seen.extend(data)
                data = change(data)
                if data is None:
                    break
                sink.sendall(data)
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def counted(data):
        with lock:
            data = change(data, passed[0])
            passed[0] += len(data or b"")
        return data

    def accept():
        with suppress(OSError):
            while True:
                inner, _ = listener.accept()
                outer = socket.create_connection(wire.parse_address(address))
                sockets.extend((inner, outer))
                threading.Thread(target=pump, args=(inner, outer, lambda data: data), daemon=True).start()
                threading.Thread(target=pump, args=(outer, inner, counted), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    yield f"127.0.0.1:{listener.getsockname()[1]}", seen
    for one in sockets:
        with suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)  # closing alone would leave a pump in recv, and the connection open
        one.close()
