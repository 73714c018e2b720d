"""Who is of this run: the ids of replicas, notes between groups, and the address that a server of ours binds.

torchft's lighthouse takes anybody in, and its managers tell their groups whoever it took in. A replica's id therefore
carries a code made with the run's token, which nobody without it can make for another id.
"""

import hashlib
import hmac
import ipaddress
import re
import socket
import struct
import uuid

GROUP_DIGITS = 6
CODE_BYTES = 16
_ID = re.compile(rf"([0-9]{{{GROUP_DIGITS}}}):([0-9a-f]{{8}}(?:-[0-9a-f]{{4}}){{3}}-[0-9a-f]{{12}}):([0-9a-f]{{32}})")
_NOTE = struct.Struct("<QI")


class StrangerError(ValueError):
    """Something that claims to come from this run and does not; in one sentence, with what to do."""


def _code(token: bytes, what: bytes, data: bytes) -> bytes:
    return hmac.digest(token, what + b"\0" + data, hashlib.sha256)[:CODE_BYTES]


def replica_id(token: bytes, group: int) -> str:
    """A fresh id for a start of group `group`: torchft sorts ids as text, hence the zeros; the uuid tells a group from
    its predecessor."""
    if not 0 <= group < 10**GROUP_DIGITS:
        raise ValueError(f"group {group} is not between 0 and {10**GROUP_DIGITS - 1}")
    name = f"{group:0{GROUP_DIGITS}d}:{uuid.uuid4()}"
    return f"{name}:{_code(token, b'replica', name.encode()).hex()}"


def group_of(token: bytes, replica: str) -> int:
    """The group that a replica's id names. Raises StrangerError unless the id was made with this run's token."""
    found = _ID.fullmatch(replica)
    if found is not None:
        name, _, code = replica.rpartition(":")
        if hmac.compare_digest(_code(token, b"replica", name.encode()).hex(), code):
            return int(found[1])
    raise StrangerError(
        f"a replica {ascii(replica)[:80]} that is not of this run is in its quorum: some other job was given this "
        "run's lighthouse address. End that job, or start this run's lighthouse with the run directory's token"
    )


def seal_note(token: bytes, step: int, group: int, note: bytes) -> bytes:
    """`note` with a code in front that says that group `group` of this run wrote it at step `step`. An empty note stays
    empty."""
    return _code(token, b"note", _NOTE.pack(step, group) + note) + note if note else b""


def open_note(token: bytes, step: int, group: int, sealed: bytes) -> bytes:
    """What `seal_note` was given. Raises StrangerError if it was anything else."""
    if not sealed:
        return b""
    code, note = sealed[:CODE_BYTES], sealed[CODE_BYTES:]
    if not hmac.compare_digest(_code(token, b"note", _NOTE.pack(step, group) + note), code):
        raise StrangerError(
            f"a note of {len(sealed)} bytes that came as group {group}'s at step {step} was not written by it: "
            "look for strangers on the network that carries the sums"
        )
    return note


def bind_address(host: str) -> str:
    """`address:0` for a server that is to be reached under `host` and under no other address of this machine.

    Raises:
        OSError: nobody knows the name.
    """
    address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][4][0]
    return f"[{address}]:0" if ipaddress.ip_address(str(address).partition("%")[0]).version == 6 else f"{address}:0"
