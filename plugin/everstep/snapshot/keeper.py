"""The keeper: a process that holds a host's snapshots and outlives the trainers (REFT's snapshot management process).

Each run has one keeper per host. It runs in a separate session, so that no signal to a process group reaches it, and
holds a lock, so that it is the only one. It verifies what trainers publish, codes parity with the keepers of other
hosts, and answers requests over TCP from processes that have the run's token. It serves every buffer of its run in its
segment, whichever groups run on the host now. It removes its segment and ends if it is told that the run is over or
gets SIGTERM, if the run directory is gone or now has another run, or if nobody has used it for `keeper_ttl_s`, or for
`EMPTY_S` while it holds nothing, as after a start that failed.

A keeper that gets SIGKILL leaves its segment behind. The next keeper of the same run on this host adopts the segment.
"""

import contextlib
import json
import logging
import os
import select
import signal
import socket
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

from everstep import wire
from everstep.run.files import read_typed
from everstep.run.token import read_token
from everstep.snapshot import peers
from everstep.snapshot.buffer import BufferReader, SnapshotError
from everstep.snapshot.coding import SLOWEST_BYTES_S, Coder, Waits
from everstep.snapshot.header import KINDS, Header, headers_to_json
from everstep.snapshot.keepers import LOCKED_EXIT, sweep, take_lock
from everstep.snapshot.peers import KeeperRecord, Neighbours
from everstep.snapshot.section import Snapshot
from everstep.snapshot.segment import Segment, run_id
from everstep.snapshot.worker_states import opened, receive

GONE_S, EMPTY_S = 20.0, 60.0
HEARTBEAT_S = 0.5
POLL_S = 0.05
STOPPED_S = 5.0
"""Seconds between two looks by which a keeper knows that it was stopped (SIGSTOP), so that nobody could use it."""
JOIN_S = 15.0
"""Seconds that an ending keeper waits for its coding thread."""

log = logging.getLogger("everstep.keeper")


class Keeper:
    """The keeper's state: segment, server, a `Coder` per rank, and a thread that codes what these find."""

    def __init__(self, run_dir: Path, segment: Segment, host: str, settings: Snapshot) -> None:
        """`segment`: the segment of any group in the keeper's directory. `host`: the address to listen on."""
        self.run_dir, self.segment, self.settings = run_dir, segment, settings
        self.token = read_token(run_dir)
        self.over = threading.Event()
        self._opened = os.open(run_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._coders: dict[tuple[int, int], Coder] = {}
        self._groups: set[int] = set()
        """The groups that have a record of this keeper in the run directory."""
        self._warned: set[str] = set()
        self._used_at = self._seen_at = self._looked_at = time.monotonic()
        self.started_at = time.time()
        self._neighbours = Neighbours(run_dir, self.token)
        timeout = timedelta(seconds=settings.transfer_timeout_s)
        self._server = wire.Server(host, self.token, self._talk, timeout)

    def record(self, group: int) -> KeeperRecord:
        host, address, path = socket.gethostname(), self._server.address, str(self.segment.path)
        return KeeperRecord(group, host, address, os.getpid(), path, self.started_at)

    def note_use(self) -> None:
        """Note that the keeper is in use: the time until it ends (keeper_ttl_s) starts again."""
        self._used_at = time.monotonic()

    def run(self) -> str:
        """Run until the keeper has to end, then remove the segment. Returns why the keeper ended."""
        why = ""
        bell = self.segment.bell()
        coding = threading.Thread(target=self._code, args=(bell,), name="coding", daemon=True)
        coding.start()
        while not self.over.wait(POLL_S if not self._coders else HEARTBEAT_S):
            why = self._reason_to_end()
            if why:
                break
            self._add_new_ranks()
            for coder in list(self._coders.values()):
                coder.note()
        self.over.set()
        self._server.close()
        self.segment.ring()
        coding.join(JOIN_S)  # it could create files again in the segment that is being removed
        self.segment.remove()
        for group in self._groups:
            with contextlib.suppress(OSError):  # the run directory may be gone, which may be why the keeper ends
                peers.record_file(self.run_dir, group).unlink()
        return why or "it was told to end"

    def _code(self, bell: int) -> None:
        """Verify and code what trainers publish, one rank after the other, so that memory and connections for one rank
        are enough. All parts of one snapshot share one deadline, also those that are published later than others."""
        moment, waits = None, Waits(0.0)
        while not self.over.is_set():
            if select.select([bell], [], [], HEARTBEAT_S)[0]:
                os.read(bell, 4096)
                self.note_use()
            self._forget_removed()
            seen = [(coder, header) for coder in list(self._coders.values()) if (header := coder.newer()) is not None]
            if seen:
                self.note_use()
                if seen[0][1].moment != moment:
                    moment, waits = seen[0][1].moment, Waits(time.monotonic() + self.settings.coding_timeout_s)
            waits.deadline += sum(header.payload_bytes for _, header in seen) / SLOWEST_BYTES_S
            for coder, header in seen:
                coder.code(header, waits)

    def _add_new_ranks(self) -> None:
        try:
            columns = self.segment.columns()
        except OSError as error:  # such as no free file descriptor: try again later, what is held remains of use
            self._warn(f"{self.segment.path} cannot be read: {error}")
            return
        for group, rank in columns:
            watched = (group, rank) in self._coders
            try:
                if watched and (peers.record_file(self.run_dir, group).exists() or not self.run_dir.is_dir()):
                    continue
                # First, and again if it was removed: a snapshot that no start can find must not count as coded.
                peers.write_record(self.run_dir, self.record(group))
                self._groups.add(group)
                if not watched:
                    segment = self.segment.beside(group)
                    self._coders[group, rank] = Coder(
                        segment, rank, self.settings, self._neighbours, self.over, self._warn
                    )
            except OSError as error:  # no run directory, or no room in it: try again later
                self._warn(f"the record of the keeper of group {group} cannot be read or written: {error}")

    def _forget_removed(self) -> None:
        """Watch no rank any more whose files were removed, as those of a group that left are."""
        known = list(self._coders)  # first: another thread adds to it
        with contextlib.suppress(OSError):  # such as no free file descriptor: the next time
            for gone in {*known}.difference(self.segment.columns()):
                self._coders.pop(gone).release()

    def _warn(self, why: str) -> None:
        """Log a warning, once, however often it comes."""
        if why not in self._warned:
            self._warned.add(why)
            log.warning("%s", why)

    def _reason_to_end(self) -> str:
        now = time.monotonic()
        if now - self._looked_at > STOPPED_S:
            self._seen_at = self._used_at = now
        self._looked_at = now
        try:
            try:
                token = read_token(self.run_dir)
            except OSError:  # a directory that was moved or unmounted is not removed: look by its descriptor
                token = read_token(Path(f"/proc/self/fd/{self._opened}"))
            if token != self.token:
                return f"{self.run_dir} belongs to another run"
            self._seen_at = now
        except (OSError, ValueError) as error:
            # Any other error may pass, such as an outage of a shared file system, or a token that others can read.
            if isinstance(error, ValueError) or not isinstance(error.__context__, FileNotFoundError):
                self._warn(f"{self.run_dir} cannot be used: {error}")
                self._seen_at = now
            elif now - self._seen_at > GONE_S:  # a shared file system may not show it for a moment
                return f"{self.run_dir} has gone"
        idle_s = now - self._used_at
        if idle_s > self.settings.keeper_ttl_s or (idle_s > EMPTY_S and self.segment.is_empty()):
            return f"nobody has used it for {idle_s:.0f} s"
        return ""

    def _talk(self, channel: wire.Channel) -> None:
        message: dict[str, Any] | None = channel.receive_frame()
        while message is not None:
            operation = str(message.get("op"))
            if operation == "open":
                # No `note_use` here: keepers that read from each other to code must not keep each other alive.
                message = self._serve_buffer(channel, message)
                continue
            if operation == "worker":
                message = self._serve_worker(channel, message)
                continue
            if operation == "inventory":
                channel.send_frame({"buffers": headers_to_json(self.segment.inventory())})
            elif operation == "ping":
                groups = sorted({group for group, _ in list(self._coders)})  # another thread adds to it
                channel.send_frame({"pid": os.getpid(), "groups": groups})
            elif operation == "keep":
                channel.send_frame({"why": receive(self.segment.path, message, channel)})
            elif operation == "end":
                channel.send_frame({})
                self.over.set()
                return
            else:
                raise wire.RefusedError(f"a keeper knows no operation '{operation}'")
            self.note_use()
            message = channel.receive_frame()

    def _find(self, message: dict[str, Any]) -> tuple[BufferReader, Header] | None:
        """Return the newest buffer of the snapshot that the message names, and its header; None if none is held."""
        kind, group, rank, identity = (message.get(key) for key in ("kind", "group", "rank", "identity"))
        if kind not in KINDS or type(rank) is not int or type(group) is not int:
            raise wire.RefusedError(f"there is no buffer of kind '{kind}', group '{group}' and rank '{rank}'")
        segment = self.segment.beside(group)
        held = [(path, header) for path, header in segment.held(kind, rank) if header.identity == identity]
        for path, header in sorted(held, key=lambda one: -one[1].sequence):
            with contextlib.suppress(OSError):
                return BufferReader(path, header.payload_bytes), header
        return None

    def _serve_buffer(self, channel: wire.Channel, message: dict[str, Any]) -> dict[str, Any] | None:
        """Serve one buffer's bytes. Returns the first message that is not about them; None when the peer leaves."""
        found = self._find(message)
        if found is None:
            channel.send_frame({"header": None})
            return channel.receive_frame()
        reader, header = found
        # A keeper that codes reads one block of each member in turn, so it reads at the pace of the slowest member.
        patience_s = self.settings.coding_timeout_s + header.payload_bytes / SLOWEST_BYTES_S
        channel.set_timeout(timedelta(seconds=patience_s))
        with contextlib.closing(reader):
            channel.send_frame({"header": header.to_json()})
            try:
                return wire.serve_ranges(channel, reader)
            except SnapshotError as error:
                raise wire.WireError(str(error)) from error

    def _serve_worker(self, channel: wire.Channel, message: dict[str, Any]) -> dict[str, Any] | None:
        """Serve a worker's own state. Returns the first message that is not about it; None when the peer leaves."""
        with opened(self.segment.path, str(message.get("name"))) as held:
            channel.send_frame({"size": held and held.size})
            return wire.serve_ranges(channel, held or wire.Pieces([]))


OOM_SCORE_ADJ = -500
"""oom_score_adj: if memory runs out, the kernel kills other processes before a keeper, which holds what a start needs.
Only root may lower it."""


def _lower_priority() -> None:
    """Lower this process's priority, because it runs beside training, and set OOM_SCORE_ADJ."""
    with contextlib.suppress(OSError):  # already lower, or not allowed here
        os.nice(10)
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(str(OOM_SCORE_ADJ))


def main(order: str) -> int:
    """Run a keeper, as a trainer's `keepers.start_keeper` orders in JSON. Returns its exit status."""
    options = json.loads(order)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    _lower_priority()
    # Ctrl-C and the end of a terminal are meant for the run, which itself tells its keepers to end.
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    run_dir, group, settings = Path(options["run_dir"]), int(options["group"]), Snapshot(**options["settings"])
    segment = Segment.of(settings, run_id(read_token(run_dir)), group)
    try:
        segment.create()
        take_lock(segment.path)
        keeper = Keeper(run_dir, segment, options["host"], settings)
    except BlockingIOError:
        told = read_typed(KeeperRecord, peers.record_file(run_dir, group))
        who = f"process {told.pid}, by its record," if told else "another process"
        log.info("%s holds the lock of %s: if it hangs, kill -9 it; the next keeper adopts it", who, segment.path)
        return LOCKED_EXIT
    except (SnapshotError, OSError, wire.WireError) as error:
        log.error("%s", error)
        return 1
    for line in sweep(segment.path.parent, settings.keeper_ttl_s, spare=segment.run):
        log.info("%s", line)
    signal.signal(signal.SIGTERM, lambda *_: keeper.over.set())
    log.info("keeping %s, adopted (group, rank) %s", segment.path, segment.columns())
    log.info("ended: %s", keeper.run())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
