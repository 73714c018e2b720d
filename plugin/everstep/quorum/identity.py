"""Who is of this run: ids of replicas and what they say, and notes between groups.

torchft's lighthouse takes anybody in, and tells every group whoever it took in. A replica's id therefore carries a code
made with the run's token, which nobody without it can make for another id, and so does what a replica says of itself.
What is summed over Gloo is not authenticated by Gloo; notes that are exchanged over it carry a code as well.
"""

import hashlib
import hmac
import re

GROUP_DIGITS = 6
CODE_BYTES = 16
_ID = re.compile(rf"([0-9]{{{GROUP_DIGITS}}}):([!-9;-~]{{1,64}}):([0-9a-f]{{{2 * CODE_BYTES}}})")


class StrangerError(ValueError):
    """Something that claims to come from this run and does not; in one sentence, with what to do."""


def _code(token: bytes, what: bytes, *parts: bytes) -> bytes:
    text = b"".join(len(part).to_bytes(8, "little") + part for part in (what, *parts))
    return hmac.digest(token, text, hashlib.sha256)[:CODE_BYTES]


def replica_id(token: bytes, group: int, life: str) -> str:
    """The id of one life of a group: torchft sorts ids as text, hence the zeros.

    Args:
        life: up to 64 printable ASCII characters without colon or space; tells a group from its predecessor.
    """
    name = f"{group:0{GROUP_DIGITS}d}:{life}"
    replica = f"{name}:{_code(token, b'replica', name.encode()).hex()}"
    if not _ID.fullmatch(replica):
        raise ValueError(f"group {group} or its life {life!r} cannot stand in an id")
    return replica


def read_id(token: bytes, replica: str) -> tuple[int, str]:
    """The group and life that a replica's id names. Raises StrangerError unless the id was made with this token."""
    found = _ID.fullmatch(replica)
    if found is not None:
        name = f"{found[1]}:{found[2]}"
        if hmac.compare_digest(_code(token, b"replica", name.encode()).hex(), found[3]):
            return int(found[1]), found[2]
    raise StrangerError(
        f"a replica {ascii(replica)[:80]} that is not of this run is at its lighthouse: some other job was given this "
        "run's lighthouse address. End that job, or start this run's lighthouse through Everstep, which admits the "
        "run's own replicas only"
    )


def saying_code(token: bytes, replica: str, text: str) -> str:
    """The code that goes with what a replica says of itself."""
    return _code(token, b"saying", replica.encode(), text.encode()).hex()


def check_saying(token: bytes, replica: str, text: object, code: object) -> str:
    """What a replica says of itself, if it is this replica that says it. Raises StrangerError."""
    if isinstance(text, str) and isinstance(code, str) and code.isascii():
        expected = saying_code(token, replica, text)
        if hmac.compare_digest(expected, code):
            return text
    raise StrangerError(f"what is said in the name of replica {ascii(replica)[:80]} was not said by it")


def seal_note(token: bytes, place: bytes, note: bytes) -> bytes:
    """`note` with a code in front that says that a member of this run wrote it for `place`. An empty note stays
    empty."""
    return _code(token, b"note", place, note) + note if note else b""


def open_note(token: bytes, place: bytes, sealed: bytes) -> bytes:
    """What `seal_note` was given. Raises StrangerError if it was anything else."""
    if not sealed:
        return b""
    code, note = sealed[:CODE_BYTES], sealed[CODE_BYTES:]
    if not hmac.compare_digest(_code(token, b"note", place, note), code):
        raise StrangerError(
            f"a note of {len(sealed)} bytes was not written by the group that it came from: look for strangers on the "
            "network that carries the sums"
        )
    return note
