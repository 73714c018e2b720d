"""The keeper: the process that outlives its trainers and holds their snapshots (REFT's snapshot management
process).

One per group and host: a session of its own, so that no signal to a process group reaches it; a lock, so that
there is only one per run, group and host. It verifies what trainers publish, codes parity with the other
groups' keepers, answers questions over TCP to holders of the run's token, and ends, removing its segment, when
it is told that the run is over, when the run directory has gone, or when nobody has spoken for it for
`keeper_ttl_s`.

A keeper that is killed leaves its segment behind; the next one started for the same run and group adopts it.
"""

import argparse
import contextlib
import fcntl
import json
import logging
import os
import resource
import signal
import socket
import sys
import threading
import time
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

from everstep import wire
from everstep.run.events import EventLog
from everstep.run.token import read_token
from everstep.snapshot import peers
from everstep.snapshot.board import Board, Channels
from everstep.snapshot.buffer import BufferReader, SnapshotError, table_bytes
from everstep.snapshot.header import KINDS, Header
from everstep.snapshot.keepers import LOCKED_EXIT
from everstep.snapshot.peers import Place
from everstep.snapshot.rank_watch import POLL_S, RankWatch
from everstep.snapshot.section import Snapshot
from everstep.snapshot.segment import Segment, run_id
from everstep.snapshot.sweep import sweep_behind, write_owner

HEARTBEAT_S = 0.5
GONE_S = 20.0
JOIN_S = 15.0
"""For a watch to end: longer than any wait of one."""
NEWS = frozenset({"part", "code", "coded"})

log = logging.getLogger("everstep.keeper")


class Keeper:
    """The process's parts: segment, server, one watch per rank."""

    def __init__(self, run_dir: Path, group: int, host: str, settings: Snapshot, encrypt: bool = False) -> None:
        self.run_dir, self.group, self.settings = run_dir, group, settings
        self.token = read_token(run_dir)
        self.segment = Segment(Path(settings.segment_dir), run_id(self.token), group)
        self.over = threading.Event()
        self.changed = threading.Condition()
        self._watches: dict[int, RankWatch] = {}
        self._spoken_at = time.monotonic()
        self._touched_ns = -1
        self._gone_since = 0.0
        self.started_at = time.time()
        timeout = timedelta(seconds=settings.transfer_timeout_s)
        self.channels = Channels(run_dir, self.token, timeout)
        self.board = Board(group, self.channels, self.changed, lambda: asdict(self.place()))
        self.turn = threading.Lock()
        self._server = wire.Server(host, self.token, self._talk, timeout, encrypt=encrypt)

    def place(self) -> Place:
        return Place(
            self.group,
            socket.gethostname(),
            self._server.address,
            os.getpid(),
            str(self.segment.path),
            self.started_at,
        )

    def spoken(self) -> None:
        """Somebody has a use for this keeper."""
        self._spoken_at = time.monotonic()

    def tell(self, kind: str, rank: int, step: int, **fields: Any) -> None:
        """An event of the run, if its directory is there. Of things so rare that no file is kept open for them."""
        if (self.run_dir / "events").is_dir():
            with (
                contextlib.suppress(OSError),
                contextlib.closing(EventLog(self.run_dir, self.group, rank, "keeper")) as events,
            ):
                events.emit(kind, step, **fields)

    def run(self) -> str:
        """Until the keeper is to end. Returns why it does; the segment has been removed then."""
        why = ""
        while not self.over.wait(POLL_S if not self._watches else HEARTBEAT_S):
            self._watch_new_ranks()
            for watch in self._watches.values():
                watch.note()
            why = self._reason_to_end()
            if why:
                break
        self.over.set()
        with self.changed:
            self.changed.notify_all()
        self._server.close()
        self.board.close()
        # A watch that is still coding would make files anew in a segment that is being removed.
        for watch in self._watches.values():
            watch.join(JOIN_S)
        self.segment.remove()
        with contextlib.suppress(OSError):  # the run directory may be gone, which is why we end
            peers.place_file(self.run_dir, self.group).unlink()
        return why or "the run is over"

    def _watch_new_ranks(self) -> None:
        try:
            ranks = self.segment.ranks()
        except OSError as error:  # no descriptor to spare: there may be one later, and what is held is of use till then
            log.warning("%s cannot be looked at: %s", self.segment.path, error)
            return
        for rank in ranks:
            if rank not in self._watches:
                try:
                    self._watches[rank] = RankWatch(self, rank)
                except RuntimeError as error:  # no thread to spare: there may be one later
                    log.warning("rank %d is not looked after yet: %s", rank, error)

    def _reason_to_end(self) -> str:
        with contextlib.suppress(OSError):  # no agent has touched it yet
            # A file's time is wall clock and a pause of the host is not silence: only its changes count.
            touched = (self.segment.path / "touched").stat().st_mtime_ns
            if touched != self._touched_ns:
                self._touched_ns = touched
                self.spoken()
        if self._run_dir_gone():
            return f"{self.run_dir} has gone, or belongs to another run"
        if time.monotonic() - self._spoken_at > self.settings.keeper_ttl_s:
            return f"nobody has spoken for it for {self.settings.keeper_ttl_s:g} s (snapshot.keeper_ttl_s)"
        return ""

    def _run_dir_gone(self) -> bool:
        """Whether the run directory has been away for a while, or is another run's by now. A shared file
        system may hide it for a moment."""
        try:
            if read_token(self.run_dir) != self.token:
                return True
        except (FileNotFoundError, ValueError):
            self._gone_since = self._gone_since or time.monotonic()
            return time.monotonic() - self._gone_since > GONE_S
        except OSError as error:
            log.warning("%s cannot be reached: %s", self.run_dir, error)
        self._gone_since = 0.0
        return False

    def _talk(self, channel: wire.Channel) -> None:
        message: dict[str, Any] | None = channel.receive_frame()
        while message is not None:
            operation = str(message.get("op"))
            if operation in NEWS:
                # Not `spoken`: keepers that only tell each other things do not keep each other alive.
                try:
                    answer = self.board.take_news(message)
                except (ValueError, TypeError) as error:
                    raise wire.RefusedError(f"the news are not understood: {error}") from error
                channel.send_frame(answer)
                message = channel.receive_frame()
                continue
            if operation == "open":
                message = self._serve_buffer(channel, message)
                continue
            if operation == "hold":
                message = self._hold_buffer(channel, message)
                continue
            if operation == "inventory":
                channel.send_frame({"buffers": self._inventory()})
            elif operation == "ping":
                channel.send_frame(asdict(self.place()))
            elif operation == "check":
                channel.send_frame({"findings": self._check()})
            elif operation == "end":
                channel.send_frame({})
                self.over.set()
                return
            else:
                raise wire.RefusedError(f"'{operation}' is nothing a keeper does")
            self.spoken()
            message = channel.receive_frame()

    def _inventory(self) -> list[dict[str, Any]]:
        """What is held, and whether it is sound as far as it has been looked at."""
        buffers = []
        for rank in self.segment.ranks():
            watch = self._watches.get(rank)
            for kind in KINDS:
                for header in filter(None, self.segment.headers(kind, rank)):
                    sound = watch and watch.sound.get((kind, header.sequence, header.code))
                    buffers.append({"header": header.to_json(), "sound": sound})
        return buffers

    def _check(self) -> list[dict[str, Any]]:
        """Every buffer's checksums, recomputed now. `damage` is None for a buffer that is as it was published."""
        findings = []
        for rank in self.segment.ranks():
            for kind in KINDS:
                for path in self.segment.files(kind, rank):
                    with contextlib.suppress(OSError, SnapshotError):  # no such buffer, or it went while we looked
                        reader = BufferReader(path)
                        with contextlib.closing(reader):
                            header = reader.header()
                            if header is not None:
                                strange = not self.segment.owns(header, kind, rank)
                                damage = "it is another buffer's file" if strange else reader.damage(header)
                                findings.append({"header": header.to_json(), "damage": damage})
        return findings

    def _find(self, message: dict[str, Any]) -> tuple[BufferReader, Header]:
        """The buffer that is asked for. Raises wire.RefusedError if it is not held here, or is damaged."""
        kind, group, rank, code = (message.get(key) for key in ("kind", "group", "rank", "code"))
        identity = message.get("identity")
        if kind not in KINDS or type(rank) is not int or rank < 0 or not isinstance(identity, list):
            raise wire.RefusedError(f"there is no buffer of kind '{kind}' and rank '{rank}'")
        for path in self.segment.files(kind, rank):
            try:
                reader = BufferReader(path)
            except OSError:
                continue
            header = reader.header()
            if (
                header is not None
                and self.segment.owns(header, kind, rank)
                and group == self.group
                and list(header.identity) == identity
                and header.code == code
            ):
                watch = self._watches.get(rank)
                if watch is None or watch.sound.get((kind, header.sequence, header.code)) is not False:
                    return reader, header
                reader.close()
                raise wire.RefusedError(f"step {header.step} of rank {rank} is damaged here")
            reader.close()
        step = identity[0] if identity else "?"
        raise wire.RefusedError(f"step {step} of rank {rank} is not held here")

    def _serve_buffer(self, channel: wire.Channel, message: dict[str, Any]) -> dict[str, Any] | None:
        """Serve one buffer's bytes. Returns the first message that is about something else, None at the end."""
        reader, header = self._find(message)
        with contextlib.closing(reader):
            channel.send_frame({"header": header.to_json()})
            source = _Served(reader, header)
            while True:
                try:
                    following = wire.serve_ranges(channel, source)
                except SnapshotError as error:
                    raise wire.WireError(str(error)) from error
                if following is None or following.get("op") != "still":
                    return following
                channel.send_frame({"still": reader.header() == header})

    def _hold_buffer(self, channel: wire.Channel, message: dict[str, Any]) -> dict[str, Any]:
        """Keep a buffer from being overwritten for as long as the peer keeps asking. Returns its first other
        message."""
        reader, header = self._find(message)
        with contextlib.closing(reader):
            while (watch := self._watches.get(header.rank)) is None:  # a rank's first buffer: seen within POLL_S
                if self.over.wait(POLL_S):
                    raise wire.RefusedError(f"the keeper of group {self.group} is ending")
            watch.hold(header.sequence)
            try:
                while True:
                    channel.send_frame({"still": reader.header() == header})
                    following = channel.receive_frame()
                    if following.get("op") != "still":
                        return following
            finally:
                watch.release(header.sequence)


class _Served:
    """A buffer's payload and table as `wire.Bytes`."""

    def __init__(self, reader: BufferReader, header: Header) -> None:
        self.size = header.payload_bytes + table_bytes(header.payload_bytes, header.split)
        self.views = reader.views


OOM_SCORE_ADJ = -500
"""When memory runs out, what took it goes before a keeper, which holds what a start needs. Only root may lower it."""
KEEPER_FILES = 4096


def _settle_in() -> None:
    """Low priority, few claims: what a process beside a training run should be."""
    with contextlib.suppress(OSError):  # already lower, or not allowed here
        os.nice(10)
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(str(OOM_SCORE_ADJ))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = KEEPER_FILES if hard == resource.RLIM_INFINITY else min(KEEPER_FILES, hard)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    if wanted < 256:
        log.warning("only %d files may be open (ulimit -n): keepers of large runs need 256", wanted)


def main(argv: list[str] | None = None) -> int:
    """The keeper process."""
    parser = argparse.ArgumentParser(prog="everstep keeper", description="Started by the agent, not by hand.")
    parser.add_argument("order", help="JSON: run_dir, group, host, settings, encrypt")
    order = json.loads(parser.parse_args(argv).order)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    _settle_in()
    # Ctrl-C and the end of a terminal are meant for the run, which tells its keepers itself.
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    run_dir, group, settings = Path(order["run_dir"]), int(order["group"]), Snapshot(**order["settings"])
    segment = Segment(Path(settings.segment_dir), run_id(read_token(run_dir)), group)
    try:
        segment.create()
        lock = os.open(segment.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        log.info("group %d of this run has a keeper on this host", group)
        return LOCKED_EXIT
    except (SnapshotError, OSError) as error:
        log.error("%s", error)
        return 1
    try:
        keeper = Keeper(run_dir, group, order["host"], settings, order["encrypt"])
    except wire.WireError as error:
        log.error("%s", error)
        return 1
    write_owner(segment.path, run_dir)
    for litter in sweep_behind(segment.root, settings.keeper_ttl_s):
        log.info("removed %s", litter.describe())
    signal.signal(signal.SIGTERM, lambda *_: keeper.over.set())
    peers.write_place(run_dir, keeper.place())
    log.info("keeping %s, adopted ranks %s", segment.path, segment.ranks())
    log.info("ended: %s", keeper.run())
    return 0


if __name__ == "__main__":
    sys.exit(main())
