"""Random damage to the files of a run's snapshots, and what a start restores: `recovery.recover` asks keepers over
their sockets. After a case of one to three faults, only the changed files are written again."""

import json
import random
from contextlib import closing
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import xxhash

from damage import damaged
from everstep.snapshot import keeper, parity, peers, recovery
from everstep.snapshot.buffer import _PREFIX, HEADER_BYTES, MAGIC, _unpack_header, chunk_digests, root_of
from everstep.snapshot.layout import Layout
from snapshot_cluster import Cluster, assert_is_step, state_of

PATIENT = timedelta(seconds=60)
"""Longest silence of a keeper. No keeper is silent here, so this only matters on a very busy machine."""
OLDER, OLD, NEW = 3, 4, 5
"""Committed steps. The files of OLDER are already overwritten when the faults begin."""
SCALE = 0.1
"""Size of the state relative to `state_of`'s: parts of some 10 KB, of the same tensors."""


def poisoned(length: int, aligned=parity.aligned_bytes):
    """Return memory with old contents, as the system may give it."""
    array = aligned(length)
    array[:] = 0xA5
    return array


class Site:
    """The files of a run of a few groups, and keepers that serve what is in them, unverified."""

    def __init__(self, groups: int = 4, scale: float = SCALE, **settings: Any) -> None:
        coded, self.scale = settings.get("parity", 1) > 0, scale
        self.strangers: list[bytes] = []
        with Cluster(groups, **settings) as stranger:
            stranger.take(OLD, NEW, coded=coded, seed=9, scale=scale)
            self.strangers += _contents(stranger).values()
        self.run = Cluster(groups, **settings)
        self.run.take(OLDER, coded=coded, scale=scale)
        self.strangers += _contents(self.run).values()
        self.run.take(OLD, NEW, coded=coded, scale=scale)
        self.run.kill_trainers()
        for group in self.run.groups:
            self.run.kill_keeper(group)
        self.files = _contents(self.run)
        for place in self.run.run_dir.glob("state/keepers/*.json"):
            place.unlink()
        settled = replace(self.run.settings, transfer_timeout_s=3600.0)  # connections may be idle
        self.keepers = [
            keeper.Keeper(self.run.run_dir, self.run.segment(group), "127.0.0.1", settled) for group in self.run.groups
        ]
        for group, each in zip(self.run.groups, self.keepers, strict=True):
            peers.write_record(self.run.run_dir, each.record(group))
        self.layout = Layout.of(state_of(NEW, scale=scale).tensors)

    def close(self) -> None:
        for each in self.keepers:
            each._server.close()
        # These keepers run in this process, which the cluster must not kill as a keeper.
        for place in self.run.run_dir.glob("state/keepers/*.json"):
            place.unlink()
        self.run.__exit__()

    def start(self, group: int) -> int:
        """Return the step that a start restores, after a check of every bit of the state; 0 if it restores none."""
        found = self.run.recover(group, timeout=PATIENT)
        if found.restored is None:
            assert found.decision.reasons, "the decision gives no reason"
            return 0
        assert (found.restored.layout, found.restored.history) == (self.layout, 1)
        assert_is_step(found.restored, found.restored.step, self.scale)
        return found.restored.step

    def corrupt(self, chance: random.Random) -> tuple[set[Path], list[str]]:
        """Apply one to three random faults. Returns the changed files and what was done."""
        changed: set[Path] = set()
        told = []
        for _ in range(chance.choice((1, 1, 2, 3))):
            path = chance.choice([path for path in self.files if path.exists()])
            what = chance.choice(FAULTS)
            told.append(f"{what.__name__} {path.parent.name[-7:]}/{path.name}")
            what(self, chance, path)
            changed.add(path)
        return changed, told


def _contents(run: Cluster) -> dict[Path, bytes]:
    """Return the bytes of all buffers of a run."""
    folders = [run.segment(group).path for group in run.groups]
    return {path: path.read_bytes() for folder in folders for path in sorted(folder.glob("group-*.[bp]*-*"))}


def _used(data: bytes) -> int:
    header = _unpack_header(data[:HEADER_BYTES])
    return HEADER_BYTES + header.payload_bytes + 16 if header else len(data)


def hurt(site: Site, chance: random.Random, path: Path) -> None:
    """Change bytes in the header or anywhere; sometimes cut off what follows."""
    data = path.read_bytes()
    end = chance.choice((1500, _used(data)))
    path.write_bytes(damaged(data[:end], chance) + chance.choice((data[end:], data[end:], b"")))


def foreign(site: Site, chance: random.Random, path: Path) -> None:
    """Replace the file by another one of this run, one of an older step, or one of another run."""
    path.write_bytes(chance.choice([*site.files.values(), *site.strangers]))


def lie(site: Site, chance: random.Random, path: Path) -> None:
    """Change several fields of the header, or take them from another file's, and make its checksum right again."""
    data = path.read_bytes()
    body, other = _body(data), _body(chance.choice([*site.files.values(), *site.strangers]))
    if body is None or other is None:
        return
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


def disguise(site: Site, chance: random.Random, path: Path) -> None:
    """Replace the file by another one whose header has this file's run, kind, group, rank, step and members."""
    body, data = _body(path.read_bytes()), chance.choice([*site.files.values(), *site.strangers])
    other = _body(data)
    if body is None or other is None:
        return
    names = ["run", "kind", "group", "rank", "step", "shared_by", "history"]
    names += chance.sample(["part", "sequence", "start", "code", "parity_group", "roots"], 3)
    path.write_bytes(_packed({**other, **{name: body[name] for name in names if name in body}}) + data[HEADER_BYTES:])


def forge(site: Site, chance: random.Random, path: Path) -> None:
    """Change a bit of the layout, and make table, root and header fit it, except the topology that the header names."""
    data = bytearray(path.read_bytes())
    header, body = _unpack_header(bytes(data[:HEADER_BYTES])), _body(bytes(data))
    if header is None or body is None or header.kind != "data" or HEADER_BYTES + header.payload_bytes > len(data):
        return
    end = HEADER_BYTES + header.payload_bytes
    if root_of(chunk_digests(memoryview(data[HEADER_BYTES:end]))) != header.root:
        return  # new checksums would make bytes valid that another fault has changed
    data[HEADER_BYTES + chance.randrange(header.last_section, header.payload_bytes)] ^= 1 << chance.randrange(8)
    table = chunk_digests(memoryview(data[HEADER_BYTES:end]))
    data[end : end + table.nbytes] = table.tobytes()
    path.write_bytes(_packed({**body, "root": root_of(table)}) + bytes(data[HEADER_BYTES:]))


def lose(site: Site, chance: random.Random, path: Path) -> None:
    path.unlink()


FAULTS = (hurt, hurt, hurt, hurt, foreign, foreign, lie, lie, disguise, forge, lose)


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


def fuzz(cases: int, seed: int, groups: int = 4, **shape: Any) -> dict[int, int]:
    """Return how often each step was restored (0: none); fail at the first wrong state. `shape`: `Site`'s arguments."""
    found: dict[int, int] = {}
    patient = mock.patch.object(recovery, "FIRST_TIMEOUT", PATIENT)
    with closing(Site(groups, **shape)) as site, mock.patch.object(parity, "aligned_bytes", poisoned), patient:
        assert site.start(0) == NEW
        for case in range(cases):
            chance = random.Random(f"{seed}/{case}")
            changed, told = site.corrupt(chance)
            try:
                step = site.start(chance.randrange(groups))
                put_back = any(what.startswith(foreign.__name__) for what in told)
                assert step != OLDER or put_back, "restored a step whose files are overwritten"
            except BaseException as error:
                error.add_note(f"seed {seed}, case {case}: {told}")
                raise
            found[step] = found.get(step, 0) + 1
            for path in changed:
                path.write_bytes(site.files[path])
    return found
