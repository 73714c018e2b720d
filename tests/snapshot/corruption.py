"""Everything that can happen to the files of a run's snapshots, at random, and what a start makes of it."""

import json
import random
import struct
from datetime import timedelta
from pathlib import Path

import xxhash

from everstep.snapshot import keeper, parity, recovery
from everstep.snapshot.buffer import HEADER_BYTES, MAGIC, _unpack_header
from everstep.snapshot.layout import Layout
from snapshot_cluster import Cluster, assert_is_step, state_of

_PREFIX = struct.Struct("<8sIQ")
AT_ONCE = timedelta(0)
TIMEOUT = timedelta(seconds=5)
OLDER, OLD, NEW = 3, 4, 5
"""Committed steps; the files of the first are overwritten when the faults begin."""


def poisoned(length: int):
    """Memory as it comes from the system at its worst: full of what somebody else left."""
    array = _aligned(length)
    array[:] = 0xA5
    return array


_aligned = parity.aligned_bytes


class Site:
    """The files of a run of a few groups, and keepers that serve whatever lies there, unverified."""

    def __init__(self, groups: int = 4, parities: int = 1) -> None:
        self.files: dict[Path, bytes] = {}
        self.strangers: list[bytes] = []
        with Cluster(groups, parity=parities) as stranger:
            for step in (OLD, NEW):
                stranger.commit(step, seed=9)
            stranger.wait()
            stranger.settled(NEW)
            self.strangers += [path.read_bytes() for g in stranger.groups for path in _files(stranger.segment(g).path)]
        self.run = Cluster(groups, parity=parities)
        for step in (OLDER, OLD, NEW):
            self.run.commit(step)
            self.run.wait()
            self.run.settled(step)
            if step == OLDER:
                older = [path.read_bytes() for g in self.run.groups for path in _files(self.run.segment(g).path)]
        self.strangers += older
        self.folders = [self.run.segment(group).path for group in self.run.groups]
        for copier in self.run.copiers.values():
            copier.close()
        self.run.copiers.clear()
        for group in self.run.groups:
            self.run.kill_keeper(group)
        self.files = {path: path.read_bytes() for folder in self.folders for path in _files(folder)}
        self.keepers = [
            keeper.Keeper(self.run.run_dir, group, "127.0.0.1", self.run.settings) for group in self.run.groups
        ]
        for place in self.run.run_dir.glob("state/keepers/*.json"):
            place.unlink()
        for each in self.keepers:
            keeper.peers.write_place(self.run.run_dir, each.place())
        self.layout = Layout.of(state_of(NEW).tensors)

    def close(self) -> None:
        for each in self.keepers:
            each._server.close()
        # These keepers are this process: it must not be killed as such.
        for place in self.run.run_dir.glob("state/keepers/*.json"):
            place.unlink()
        self.run.__exit__()

    def start(self, group: int) -> int:
        """What a start restores: its step, checked bit for bit, or 0."""
        found = recovery.recover(
            self.run.run_dir, group=group, rank=0, ranks=1, layout=self.layout, disk_step=0,
            timeout=TIMEOUT, patience=AT_ONCE,
        )  # fmt: skip
        if found.restored is None:
            assert found.decision.reasons, "without a reason"
            return 0
        assert_is_step(found.restored, found.restored.step)
        assert found.restored.step in (OLD, NEW), "a step that is not there any more"
        return found.restored.step

    def restore_files(self, changed: set[Path]) -> None:
        for path in changed:
            path.write_bytes(self.files[path])

    def corrupt(self, chance: random.Random) -> tuple[set[Path], list[str]]:
        """One to three things go wrong. Which files, and what."""
        changed: set[Path] = set()
        told = []
        for _ in range(chance.choice((1, 1, 2, 3))):
            path = chance.choice(list(self.files))
            what = chance.choice(FAULTS)
            told.append(f"{what.__name__} {path.parent.name[-7:]}/{path.name}")
            for touched in what(self, chance, path):
                changed.add(touched)
        return changed, told


def _files(folder: Path) -> list[Path]:
    return sorted([*folder.glob("rank-*.buffer-*"), *folder.glob("rank-*.parity-*")])


def _used(data: bytes) -> int:
    header = _unpack_header(data[:HEADER_BYTES])
    return HEADER_BYTES + header.payload_bytes + 16 if header else len(data)


def flip(site: Site, chance: random.Random, path: Path) -> list[Path]:
    data = bytearray(path.read_bytes())
    for _ in range(chance.choice((1, 1, 4))):
        if data:
            at = chance.randrange(1500) if chance.random() < 0.3 else chance.randrange(_used(bytes(data)))
            data[min(at, len(data) - 1)] ^= 1 << chance.randrange(8)
    path.write_bytes(data)
    return [path]


def truncate(site: Site, chance: random.Random, path: Path) -> list[Path]:
    data = path.read_bytes()
    path.write_bytes(data[: chance.choice((0, 10, 19, 300, HEADER_BYTES, chance.randrange(len(data) + 1)))])
    return [path]


def zero(site: Site, chance: random.Random, path: Path) -> list[Path]:
    data = bytearray(path.read_bytes())
    at = chance.randrange(_used(bytes(data)) or 1)
    data[at : at + 4096] = bytes(len(data[at : at + 4096]))
    path.write_bytes(data)
    return [path]


def misplace(site: Site, chance: random.Random, path: Path) -> list[Path]:
    path.write_bytes(chance.choice(list(site.files.values())))
    return [path]


def swap(site: Site, chance: random.Random, path: Path) -> list[Path]:
    other = chance.choice(list(site.files))
    mine, theirs = path.read_bytes(), other.read_bytes()
    path.write_bytes(theirs)
    other.write_bytes(mine)
    return [path, other]


def foreign(site: Site, chance: random.Random, path: Path) -> list[Path]:
    path.write_bytes(chance.choice(site.strangers))
    return [path]


def lie(site: Site, chance: random.Random, path: Path) -> list[Path]:
    """A header whose checksum is right and whose words are not; in several fields, or all that name another file."""
    data = path.read_bytes()
    body, other = _body(data), _body(chance.choice([*site.files.values(), *site.strangers]))
    if body is None or other is None:
        return [path]
    for name in chance.sample(sorted(body), chance.choice((1, 1, 2, 4, 8))):
        value = body[name]
        if chance.random() < 0.5:
            body[name] = other.get(name)
        elif isinstance(value, int):
            body[name] = value + chance.choice((-1, 1, 64, -64, 1 << 40, -(1 << 70)))
        elif isinstance(value, str):
            body[name] = chance.choice(("", "parity", "data", value[::-1], value + "0", 7, None))
        elif isinstance(value, list):
            body[name] = chance.choice(
                ([], value[::-1], [*value, *value], [0, 1 << 50], "x", [[-1, 3]], [[0, 1 << 60]])
            )
        else:
            body[name] = chance.choice(({}, [], 1.5, {"part": [0, 1]}, None))
    path.write_bytes(_packed(body) + data[HEADER_BYTES:])
    return [path]


def disguise(site: Site, chance: random.Random, path: Path) -> list[Path]:
    """Another file, whose header says in run, kind, group, rank, step and members that it is this one."""
    body, data = _body(path.read_bytes()), chance.choice([*site.files.values(), *site.strangers])
    other = _body(data)
    if body is None or other is None:
        return [path]
    names = ["run", "kind", "group", "rank", "step", "members", "history"]
    names += chance.sample(["part", "witness", "witness_digest", "sequence", "code", "parity_group", "givers"], 3)
    path.write_bytes(_packed({**other, **{name: body[name] for name in names if name in body}}) + data[HEADER_BYTES:])
    return [path]


def behead(site: Site, chance: random.Random, path: Path) -> list[Path]:
    """This file's bytes under another file's header, or the reverse."""
    other = chance.choice(list(site.files.values()))
    mine = path.read_bytes()
    path.write_bytes(
        chance.choice((mine[:HEADER_BYTES] + other[HEADER_BYTES:], other[:HEADER_BYTES] + mine[HEADER_BYTES:]))
    )
    return [path]


def garbage(site: Site, chance: random.Random, path: Path) -> list[Path]:
    path.write_bytes(
        chance.choice((b"", MAGIC, MAGIC + b"\xff" * 500, _packed({}), _packed([]), _packed({"schema": 3})))
    )
    return [path]


FAULTS = (flip, flip, truncate, zero, misplace, swap, foreign, lie, lie, disguise, behead, garbage)


def _body(data: bytes) -> dict | None:
    if len(data) < _PREFIX.size or not data.startswith(MAGIC):
        return None
    _, length, _ = _PREFIX.unpack_from(data)
    try:
        body = json.loads(data[_PREFIX.size : _PREFIX.size + length])
    except ValueError:
        return None
    return body if isinstance(body, dict) and len(body) > 20 else None


def _packed(body) -> bytes:
    text = json.dumps(body).encode()
    return (_PREFIX.pack(MAGIC, len(text), xxhash.xxh3_64_intdigest(text)) + text).ljust(HEADER_BYTES, b"\0")


def fuzz(cases: int, seed: int, groups: int = 4, parities: int = 1) -> dict[int, int]:
    """How often each step was restored (0: none). Raises AssertionError at the first wrong one."""
    parity.aligned_bytes = poisoned
    site = Site(groups, parities)
    found: dict[int, int] = {}
    try:
        assert site.start(0) == NEW
        for case in range(cases):
            chance = random.Random(f"{seed}/{case}")
            changed, told = site.corrupt(chance)
            try:
                step = site.start(chance.randrange(groups))
            except BaseException as error:
                error.add_note(f"seed {seed}, case {case}: {told}")
                raise
            found[step] = found.get(step, 0) + 1
            site.restore_files(changed)
    finally:
        parity.aligned_bytes = _aligned
        site.close()
    return found
