"""The event log: one JSON object a line, appended by every process of a run, readable after any crash.

A run directory holds `events/group-K.rank-R.jsonl` of each worker, `events/ROLE-K.jsonl` of what else belongs to a
group (agents, keepers), and `events/ROLE.jsonl` of the others (supervisor, lighthouse, chaos). Each line carries wall
time `t` and monotonic time `mono` (seconds), `role`, `group`, `rank`, `step`, `kind` and the kind's own fields.
Everything that is shown or reported about a run is computed from these files, so a view, a report and a test read the
same thing.

A line is one `write` to a file opened for appending: writers never interleave, and a killed writer leaves at
most one torn line, which readers skip and the next writer closes. A line that is no event of its kind
(`everstep.run.event_fields`), however it came there, is skipped too.
"""

import contextlib
import errno
import heapq
import json
import os
import re
import sys
import time
from collections.abc import Iterable, Iterator, Set
from pathlib import Path
from typing import Any

from everstep.run.event_fields import OF_RANK_0, fits
from everstep.run.files import open_own
from everstep.run.regular import NotRegularError, open_regular

LONGEST_LINE = 16 << 20
"""Bytes; a commit names every slot of a step."""
MOST_UNWRITTEN = 100
READ_AT_ONCE = 1 << 16
"""Bytes of each log that are kept while those of a run are merged."""
NEAR = 1 << 20
"""Bytes from the end of a log."""
_END = 1 << 16
"""Bytes at the end of a log in which an event is looked for first."""
_KIND = re.compile(rb'"kind":"([^"]*)"')


def event_path(run_dir: Path, group: int | None, rank: int | None, role: str) -> Path:
    """The file that `role` appends to."""
    if role == "worker":
        name = f"group-{group}.rank-{rank}.jsonl"
    else:
        name = f"{role}.jsonl" if group is None else f"{role}-{group}.jsonl"
    return Path(run_dir) / "events" / name


def _plain(value: Any) -> Any:
    """JSON for what json does not know: tensor and numpy scalars by value, everything else as text."""
    item = getattr(value, "item", None)
    return item() if callable(item) else str(value)


class EventLog:
    """Appends one process's events. `role` says what it is: see the module.

    Safe to share with forked children and to keep open while the run directory is read. A disk that refuses
    the write costs the event, not the run: it is said on stderr once.
    """

    def __init__(self, run_dir: Path, group: int | None, rank: int | None, role: str):
        self.path = event_path(run_dir, group, rank, role)
        self._head = {"role": role, "group": group, "rank": rank}
        self._complained = False
        self.unwritten: list[dict[str, Any]] = []
        """The newest events that the disk refused, for who wants to tell them otherwise."""
        # The wall clock of a host may be set while we run; what happened did not happen in another order. A host may
        # also sleep meanwhile, which the monotonic clock leaves out.
        self._booted = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
        self._fd = open_own(self.path, os.O_APPEND)
        size = os.fstat(self._fd).st_size
        # The last writer may have died inside a line, or a full disk taken a part of one: ours must not continue it.
        self._is_torn = size > 0 and os.pread(self._fd, 1, size - 1) != b"\n"

    def emit(self, kind: str, step: int | None = None, **fields: Any) -> dict[str, Any]:
        """Append one event and return it; of a kind in OF_RANK_0 only if this is rank 0, or has a reason to tell.
        `step` is the committed step worked on, counted from 1."""
        event = {
            "t": self._booted + time.clock_gettime(time.CLOCK_BOOTTIME),
            "mono": time.monotonic(),
            **self._head,
            "step": step,
            "kind": kind,
            **fields,
        }
        if self._head["rank"] and kind in OF_RANK_0 and not fields.get("reason"):
            return event
        line = (json.dumps(event, default=_plain, separators=(",", ":")) + "\n").encode()
        try:
            line = b"\n" * self._is_torn + line
            self._is_torn = os.write(self._fd, line) < len(line)
            if self._is_torn:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            if not self._complained:
                print(f"everstep: events are lost, {self.path}: {error}", file=sys.stderr, flush=True)
            self._complained = True
            self.unwritten = [*self.unwritten[-MOST_UNWRITTEN:], event]
        return event

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _kind_of(line: bytes) -> str:
    """To look is cheaper than to parse it, and safe, as an event's kind stands before its own fields."""
    found = _KIND.search(line)
    return found[1].decode(errors="replace") if found else ""


def _parse(line: bytes, kinds: Set[str] | None = None) -> dict[str, Any] | None:
    """The event of a line; None: it is none, or of none of these kinds."""
    if kinds is not None and (kind := _kind_of(line)) and kind not in kinds:
        return None
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if type(event) is not dict or "t" not in event or type(event.get("kind")) is not str or not fits(event):
        return None
    if kinds is not None and event["kind"] not in kinds:
        return None
    event = {"mono": event["t"], "group": None, "rank": None, "step": None} | event
    return event if line.isascii() and b"\\" not in line else shown(event)


def shown(value: Any) -> Any:
    """`value` with escapes for characters that a terminal would obey: a reason may quote what came from elsewhere, and
    must not make a line of its own."""
    if isinstance(value, str):
        return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in value)
    if isinstance(value, list):
        return [shown(item) for item in value]
    if isinstance(value, dict):
        return {shown(key): shown(item) for key, item in value.items()}
    return value


def _lines(path: Path, offset: int, most: int) -> list[bytes]:
    """Lines of a log from there on, of about so many bytes, but for one that is torn by a crash or being written. One
    that is too long for an event comes in parts. Raises OSError if it cannot be read now."""
    lines: list[bytes] = []
    try:
        with open_regular(path, links=False) as file:
            file.seek(offset)
            while most > 0 and (line := file.readline(LONGEST_LINE)):
                if not line.endswith(b"\n") and len(line) < LONGEST_LINE:
                    break
                lines.append(line)
                most -= len(line)
    except (FileNotFoundError, NotRegularError):  # gone, a link or a pipe
        return []
    return lines


def read_events(
    run_dir: Path, kinds: Set[str] | None = None, lately: Set[str] = frozenset()
) -> Iterator[dict[str, Any]]:
    """All events of a run so far, in order of wall time; each file's own order is kept even if a clock jumps.

    Args:
        kinds: only events of these. A run directory without events yields nothing.
        lately: of these kinds, such as OF_EVERY_STEP, only what stands near the end of its log, and the newest before.

    Raises OSError when a log cannot be read now.
    """
    return EventTail(run_dir).past(kinds, lately)


def last_event(path: Path, kinds: Set[str]) -> dict[str, Any] | None:
    """The newest event of these kinds in one log, read from its end; None: there is none.

    What it costs does not grow with the log, as long as such events are not rare in it.
    """
    try:
        log = open_regular(path, links=False)
    except OSError:  # none yet, or no log
        return None
    with log as file:
        size, length = file.seek(0, os.SEEK_END), _END
        while True:
            begin = max(0, size - length)
            file.seek(begin)
            lines = file.read(size - begin).splitlines(keepends=True)
            for line in reversed(lines[1 if begin else 0 :]):  # the first may be a part of one
                if line.endswith(b"\n") and (event := _parse(line, kinds)) is not None:
                    return event
            if begin == 0:
                return None
            length *= 8


class EventTail:
    """Follows a growing run directory: each `new()` returns the events appended since the last call."""

    def __init__(self, run_dir: Path):
        self._folder = Path(run_dir) / "events"
        self._offsets: dict[Path, int] = {}

    def skip_to_end(self) -> None:
        """Forget what is there: only events appended from now on are returned."""
        for path in self._folder.glob("*.jsonl"):
            self._offsets[path] = path.stat().st_size

    def new(self) -> list[dict[str, Any]]:
        """Events since the last call, by wall time. A line still being written is left for the next call, as is a log
        that cannot be read now."""
        return list(_merged(map(_as_far_as_it_goes, map(self._read, self._logs()))))

    def past(self, kinds: Set[str] | None = None, lately: Set[str] = frozenset()) -> Iterator[dict[str, Any]]:
        """As `read_events`, of what was appended since the last call; to be read to its end, after which `new` goes on.
        It takes little memory, however much that is."""
        return _merged([self._read(log, kinds, lately) for log in self._logs()])

    def _logs(self) -> list[Path]:
        return sorted(self._folder.glob("*.jsonl"))

    def _read(
        self, path: Path, kinds: Set[str] | None = None, lately: Set[str] = frozenset()
    ) -> Iterator[dict[str, Any]]:
        """It is open only while some lines are read: a run may have more logs than a process descriptors."""
        try:
            size, at = path.lstat().st_size, self._offsets.get(path, 0)
        except FileNotFoundError:
            return
        early: dict[int, bytes] = {}
        newest: dict[str, int] = {}
        while at < size and (lines := _lines(path, at, READ_AT_ONCE)):
            for line in lines:
                if lately and at < size - NEAR and (kind := _kind_of(line)) in lately:
                    early.pop(newest.get(kind, -1), None)
                    newest[kind] = at
                early[at] = line
                at += len(line)
            self._offsets[path] = at
            if not lately or at >= size - NEAR:
                yield from filter(None, (_parse(line, kinds) for line in early.values()))
                early.clear()
        yield from filter(None, (_parse(line, kinds) for line in early.values()))


def _as_far_as_it_goes(events: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    with contextlib.suppress(OSError):
        yield from events


def _merged(logs: Iterable[Iterator[dict[str, Any]]]) -> Iterator[dict[str, Any]]:
    return heapq.merge(*logs, key=lambda event: event["t"])
