"""A small HTTP server for the page of a run and for its figures.

It takes MOST_CONNECTIONS at once, and ends each after CONNECTION_S. It answers only requests whose Host header names
this machine, so a web page that points its own domain at this address (DNS rebinding) can read nothing.
"""

import asyncio
import contextlib
import email
import ipaddress
import socket
import threading
from collections.abc import Callable, Set
from http import HTTPStatus

MOST_CONNECTIONS = 16
CONNECTION_S = 10.0


def serve(listening: socket.socket, paths: Set[str], kind: str, document: Callable[[], bytes]) -> None:
    """Serve one document under some paths from a thread, on a listening socket, as long as this process lives. `kind`:
    its content type. `document` is called for each request."""
    held: set[asyncio.StreamWriter] = set()

    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(held) < MOST_CONNECTIONS:
            held.add(writer)
            with contextlib.suppress(OSError, EOFError, asyncio.LimitOverrunError):  # it leaves, or says too much
                async with asyncio.timeout(CONNECTION_S):
                    writer.write(await respond(await reader.readuntil(b"\r\n\r\n")))
                    writer.close()
                    await writer.wait_closed()
            held.remove(writer)
        writer.transport.abort()

    async def respond(request: bytes) -> bytes:
        line, _, headers = request.partition(b"\r\n")
        path = line.decode(errors="replace").partition(" ")[2].partition(" ")[0].partition("?")[0]
        status, data = HTTPStatus.OK, document()
        if not await asyncio.to_thread(is_ours, email.message_from_bytes(headers)["Host"] or ""):
            status, data = HTTPStatus.FORBIDDEN, b"use the host's own name, its address or localhost in the address"
        elif path not in paths:
            status, data = HTTPStatus.NOT_FOUND, b"nothing is here"
        head = f"HTTP/1.1 {status} {status.phrase}\r\nContent-Type: {kind}\r\nContent-Length: {len(data)}\r\n"
        return head.encode() + b"Cache-Control: no-store\r\nConnection: close\r\n\r\n" + data

    async def run() -> None:
        await (await asyncio.start_server(take, sock=listening)).serve_forever()

    threading.Thread(target=lambda: asyncio.run(run()), name="serve", daemon=True).start()


def is_ours(host: str) -> bool:
    """Whether a Host header names this machine: an address, `localhost` or its own name, with or without a port. May
    wait for a name server."""
    name = host.strip().lower()
    name = name[1 : name.find("]")] if name.startswith("[") else name.partition(":")[0]
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return name in ("localhost", socket.gethostname().lower()) or name == socket.getfqdn().lower()
    return True
