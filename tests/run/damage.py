"""Random damage for tests of readers: of the bytes of a file, a message or a config."""

import json

PIECES = (
    b"[" * 3000, b"{" * 3000, b"9" * 5000, b"0x" + b"f" * 99, b"1e999", b"-1", b"-", b"NaN", b"inf", b"null", b"true",
    b'"', b"'''", b"[", b"]", b"[[", b"{", b"}", b"=", b".", b",", b"\n", b"\t", b"\r", b"#", b"\0", b"\x1b[2J",
    b"\xff", "é".encode(), b"\\u0000", b"1979-05-27", b'{"dict":', b"class", b"mode", b"[training]",
    b"[fault_tolerance]", bytes(8), b"\xff" * 8,
)  # fmt: skip
VALUES = [
    None, True, False, -1, 0, 1, 1.5, 1e300, -1e300, 1 << 62, 1 << 80, "", "x", "\x1b[2J", "commit", "fault", [],
    [None], [1e300], [[1, 2]], {},
]  # fmt: skip


def damaged(data, chance, structure=0):
    """Return a copy of the bytes `data` that differs from it, damaged in one to five places.

    structure: number of bytes at the end that describe the rest; half of the damage is done there.
    """
    hurt = data
    while hurt == data:
        hurt = bytearray(data)
        for _ in range(chance.choice([1, 1, 2, 5])):
            least = max(0, len(hurt) - structure) if structure and chance.random() < 0.5 else 0
            at = chance.randrange(least, len(hurt)) if hurt else 0
            match chance.randrange(8):
                case 0 if hurt:
                    hurt[at] ^= 1 << chance.randrange(8)
                case 1:
                    hurt[at : at + chance.choice([0, 1, 9])] = chance.choice(PIECES)
                case 2:
                    hurt[at : at + chance.randrange(20)] = chance.randbytes(chance.randrange(20))
                case 3:
                    del hurt[at : at + chance.randrange(20)]
                case 4:
                    del hurt[at:]
                case 5:
                    lines = bytes(hurt).split(b"\n")
                    chance.shuffle(lines)
                    hurt[:] = b"\n".join(lines)
                case 6:
                    hurt[:] = chance.choice(PIECES) if chance.random() < 0.1 else hurt
                case 7:
                    lines = bytes(hurt).split(b"\n")
                    place = chance.randrange(len(lines))
                    lines[place] = planted(lines[place], chance)
                    hurt[:] = b"\n".join(lines)
        hurt = bytes(hurt)
    return hurt


def planted(line, chance):
    """Return a JSON object with one value changed or one key removed. Lines that are no JSON object are not changed."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return line
    if isinstance(found, dict) and found:
        key = chance.choice([*found])
        if chance.random() < 0.3:
            del found[key]
        else:
            found[key] = chance.choice(VALUES)
    return json.dumps(found).encode()
