"""The event logs: each process of a run appends one JSON object a line. They can be read after any crash.

A run directory holds `events/group-K.rank-R.jsonl` for each worker, `events/agent-K.jsonl` for a group's agents, and
`events/ROLE.jsonl` for others (supervisor, lighthouse, chaos, scale); keepers have none. Each line has wall time `t`,
monotonic time `mono` (seconds), `role`, `group`, `rank`, `step`, `kind` and the fields of that kind.
Everything that is shown or reported about a run is computed from these files.

Each line is one `write` to a file opened for appending, so lines of several writers never mix. A killed writer leaves
at most one torn line, which the next writer ends with a newline. Readers skip it, and any other line that is no valid
event of its kind (`everstep.run.event_fields`).
"""

import contextlib
import errno
import heapq
import json
import os
import re
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence, Set
from pathlib import Path
from typing import Any

from everstep.run.event_fields import OF_RANK_0, event_in
from everstep.run.files import NotRegularError, open_own, open_regular

LONGEST_LINE = 16 << 20
"""Bytes. A commit names every slot of a step, so lines can be long."""
MOST_UNWRITTEN = 1000
READ_AT_ONCE = 1 << 16
"""Bytes of each log that are in memory while the logs of a run are merged, or one is searched from its end."""
NEAR = 1 << 20
"""Bytes at the end of a log that count as its end for `read_events(lately=...)`."""
_BOOTED = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
"""Wall time of the boot, for all processes that a launcher forks: somebody may set the wall clock during the run, which
must not change the order of events. CLOCK_BOOTTIME also counts the time that the host sleeps, which the monotonic clock
leaves out."""
_KIND = re.compile(rb'"kind":"([^"]*)"')


def event_path(run_dir: Path, group: int | None, rank: int | None, role: str) -> Path:
    """Return the log that a process appends to: of a worker by group and rank, of others by role and group (if any)."""
    if role == "worker":
        name = f"group-{group}.rank-{rank}.jsonl"
    else:
        name = f"{role}.jsonl" if group is None else f"{role}-{group}.jsonl"
    return Path(run_dir) / "events" / name


def _plain(value: Any) -> Any:
    """Return a JSON value for a type that json does not know: tensor and numpy scalars by value, others as text."""
    item = getattr(value, "item", None)
    return item() if callable(item) else str(value)


class EventLog:
    """Appends the events of one process with the role `role` (see the module).

    Threads and forked children may share it, and the log may be read meanwhile. If the disk refuses a write, the run
    goes on; the first such error is printed on stderr, and the event is written before the next one that fits.
    """

    def __init__(self, run_dir: Path, group: int | None, rank: int | None, role: str):
        self.path = event_path(run_dir, group, rank, role)
        self._head = {"role": role, "group": group, "rank": rank}
        self._complained = False
        self.unwritten: deque[dict[str, Any]] = deque(maxlen=MOST_UNWRITTEN)
        """The newest events that the disk refused. A caller that shows them in another way may clear it."""
        self._lock = threading.Lock()
        self._fd = open_own(self.path, os.O_APPEND)
        size = os.fstat(self._fd).st_size
        # The last writer may have died within a line, or a full disk cut one. A new event must not continue that line.
        self._is_torn = size > 0 and os.pread(self._fd, 1, size - 1) != b"\n"

    def emit(self, kind: str, step: int | None = None, **fields: Any) -> dict[str, Any]:
        """Append one event and return it. Events of a kind in OF_RANK_0 are only appended by rank 0, or by another
        rank if they have a `reason`. `step` is the step that is worked on, counted from 1."""
        event = {
            "t": _BOOTED + time.clock_gettime(time.CLOCK_BOOTTIME),
            "mono": time.monotonic(),
            **self._head,
            "step": step,
            "kind": kind,
            **fields,
        }
        if self._head["rank"] and kind in OF_RANK_0 and not fields.get("reason"):
            return event
        with self._lock:
            self.unwritten.append(event)
            try:
                while self.unwritten:
                    self._write(self.unwritten[0])
                    self.unwritten.popleft()
            except OSError as error:
                if not self._complained:
                    print(f"everstep: cannot write events to {self.path}: {error}", file=sys.stderr, flush=True)
                self._complained = True
        return event

    def _write(self, event: dict[str, Any]) -> None:
        line = (json.dumps(event, default=_plain, separators=(",", ":")) + "\n").encode()
        line = b"\n" * self._is_torn + line
        self._is_torn = os.write(self._fd, line) < len(line)
        if self._is_torn:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1  # the number may soon be another file's, which a late write must not reach


def _kind_of(line: bytes) -> str:
    """Return a line's kind, or "", without parsing it, which would cost more. The kind is written before its fields."""
    found = _KIND.search(line)
    return found[1].decode(errors="replace") if found else ""


def _parse(line: bytes, kinds: Set[str] | None = None) -> dict[str, Any] | None:
    """Return the event in a line; None if it is no valid event, or of none of these kinds."""
    if kinds is not None and (kind := _kind_of(line)) and kind not in kinds:
        return None
    event = event_in(line)
    if event is None or (kinds is not None and event["kind"] not in kinds):
        return None
    event = {"mono": event["t"], "group": None, "rank": None, "step": None} | event
    return event if line.isascii() and b"\\" not in line else shown(event)


def shown(value: Any) -> Any:
    """Return `value` with control characters escaped. A reason may quote text of other processes, which must neither
    control the terminal nor begin a line."""
    if isinstance(value, str):
        return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in value)
    if isinstance(value, list):
        return [shown(item) for item in value]
    if isinstance(value, dict):
        return {shown(key): shown(item) for key, item in value.items()}
    return value


def named(groups: Sequence[int]) -> str:
    """Return these groups as text: up to eight ids, and how many more there are."""
    ids = ", ".join(map(str, sorted(groups)[:8])) + (f" and {len(groups) - 8} more" if len(groups) > 8 else "")
    return f"group{'s' if len(groups) > 1 else ''} {ids}"


def _lines(path: Path, offset: int, most: int) -> list[bytes]:
    """Return about `most` bytes of whole lines from `offset` on; a last line without a newline is left out, as it is
    torn or still being written. A line above LONGEST_LINE comes in parts. Raises OSError if the log cannot be read."""
    lines: list[bytes] = []
    try:
        with open_regular(path, links=False) as file:
            file.seek(offset)
            while most > 0 and (line := file.readline(LONGEST_LINE)):
                if not line.endswith(b"\n") and len(line) < LONGEST_LINE:
                    break
                lines.append(line)
                most -= len(line)
    except (FileNotFoundError, IsADirectoryError, NotRegularError):  # it was removed, or is a link or a pipe
        return []
    return lines


def read_events(
    run_dir: Path, kinds: Set[str] | None = None, lately: Set[str] = frozenset()
) -> Iterator[dict[str, Any]]:
    """Yield all events of a run so far, if any, in order of wall time. Each file's order is kept even if a clock jumps.

    Args:
        kinds: only events of these kinds; None: of all.
        lately: of these kinds (such as OF_EVERY_STEP) only the events within NEAR bytes of the end of each log, and the
            newest one before that.

    Raises OSError if a log cannot be read now.
    """
    return EventTail(run_dir).past(kinds, lately)


def last_event(path: Path, kinds: Set[str]) -> dict[str, Any] | None:
    """Return the newest event of these kinds in one log; None if there is none.

    The log is read from its end, so the cost does not grow with the log unless such events are rare in it. The memory
    needed does not grow with it either.
    """
    try:
        log = open_regular(path, links=False)
    except OSError:  # there is none yet, or it is no regular file
        return None
    with log as file:
        end, rest = file.seek(0, os.SEEK_END), b""
        while end > 0:
            begin = max(0, end - READ_AT_ONCE)
            file.seek(begin)
            lines = (file.read(end - begin) + rest).splitlines(keepends=True)
            for line in reversed(lines[1 if begin else 0 :]):  # the first may be only the end of a line
                if line.endswith(b"\n") and (event := _parse(line, kinds)) is not None:
                    return event
            rest = lines[0] if lines and len(lines[0]) < LONGEST_LINE else b""
            end = begin
    return None


class EventTail:
    """Follows the logs of a live run: each `new()` returns the events appended since the last call."""

    def __init__(self, run_dir: Path):
        self._folder = Path(run_dir) / "events"
        self._offsets: dict[Path, int] = {}

    def skip_to_end(self) -> None:
        """Skip the events that exist now: only events appended after this call are returned."""
        for path in self._folder.glob("*.jsonl"):
            self._offsets[path] = path.stat().st_size

    def new(self) -> list[dict[str, Any]]:
        """Return the events since the last call, in order of wall time. A line that is still being written is left for
        the next call, and so is a log that cannot be read now."""
        return list(_merged(map(_as_far_as_it_goes, map(self._read, self._logs()))))

    def past(self, kinds: Set[str] | None = None, lately: Set[str] = frozenset()) -> Iterator[dict[str, Any]]:
        """Like `read_events`, yield the events appended since the last call. Read the iterator to its end; `new` goes
        on from there. The memory needed does not grow with the number of events."""
        return _merged([self._read(log, kinds, lately) for log in self._logs()])

    def _logs(self) -> list[Path]:
        return sorted(self._folder.glob("*.jsonl"))

    def _read(
        self, path: Path, kinds: Set[str] | None = None, lately: Set[str] = frozenset()
    ) -> Iterator[dict[str, Any]]:
        """Yield the events of one log. The file is open only while lines are read, because a run may have more logs
        than a process may have descriptors."""
        try:
            size, at = path.lstat().st_size, self._offsets.get(path, 0)
        except FileNotFoundError:
            return
        if size < at:  # somebody has emptied or replaced the log, as logrotate does
            self._offsets[path] = at = 0
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
