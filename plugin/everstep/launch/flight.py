"""Which rank has not come to which collective: torch's Flight Recorder, of every rank of a group that hangs.

A worker answers a signal with what the recorder holds, one instance for each backend: as JSON, which is read here, and
as torch's own dump with stacks, for `torchfrtrace`. A thread of its own does it, which waits for the signal, so it
answers as long as the interpreter's lock is free.
"""

import contextlib
import json
import signal
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from everstep.launch.private import flight_records
from everstep.run import typed
from everstep.run.files import write_whole
from everstep.run.regular import read_regular

SIGNAL = signal.SIGRTMIN + 7
BACKENDS = ("gloo", "nccl", "nccl2")
LARGEST = 32 << 20


def dump_path(run_dir: Path, group: int, rank: int) -> Path:
    """What a rank's recorder held when its group last hung, as JSON by backend."""
    return Path(run_dir) / "logs" / f"group-{group}" / f"rank-{rank}.flight.json"


def listen(run_dir: Path, group: int, rank: int) -> None:
    """From now on SIGNAL makes this process write what its recorder holds. To be called by the main thread, before
    there are others: they inherit that the signal is not theirs."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {SIGNAL})
    path = dump_path(run_dir, group, rank)  # what is there says why it was started again

    def answer() -> None:
        while True:
            signal.sigwait({SIGNAL})
            with contextlib.suppress(OSError):
                _dump(path, rank)

    threading.Thread(target=answer, name="flight-recorder", daemon=True).start()


def _dump(path: Path, rank: int) -> None:
    held: dict[str, Any] = {}
    for backend in BACKENDS:
        with contextlib.suppress(RuntimeError, ValueError):
            as_json, whole = flight_records(backend)
            found = json.loads(as_json)
            if found.get("entries"):
                held[backend] = found
                write_whole(path.with_name(f"flight-recorder-{backend}-{rank}"), whole)
    write_whole(path, json.dumps(held).encode())


@dataclass(frozen=True)
class Operation:
    """A collective of one process group, as each of its ranks counts them."""

    group: str
    number: int
    name: str
    shapes: str


def entries_of(path: Path) -> list[dict[str, Any]]:
    """The entries of a rank's dump; none where there is none, or what is no dump."""
    try:
        held = typed.loads(read_regular(path, LARGEST))
    except (OSError, typed.UnfitError):
        return []
    dumps = held.values() if isinstance(held, dict) else []
    lists = [dump.get("entries") for dump in dumps if isinstance(dump, dict)]
    return [entry for entries in lists if isinstance(entries, list) for entry in entries if isinstance(entry, dict)]


def _operation(entry: dict[str, Any]) -> Operation | None:
    group, number, name = entry.get("process_group"), entry.get("collective_seq_id"), entry.get("profiling_name")
    if not isinstance(group, list) or type(number) is not int or not isinstance(name, str) or entry.get("is_p2p"):
        return None
    shapes = " ".join(str(size) for size in entry.get("input_sizes") or [])
    return Operation(" ".join(map(str, group))[:80], number, name.rpartition(":")[2][:80], shapes[:80])


def waits(dumps: Mapping[int, list[dict[str, Any]]]) -> list[str]:
    """In a sentence each: for which collectives some ranks wait, and which ranks have not come to them; by rank what
    its recorder held."""
    newest: dict[str, dict[int, int]] = {}
    pending: dict[str, dict[Operation, list[int]]] = {}
    for rank, entries in sorted(dumps.items()):
        for entry in entries:
            if (operation := _operation(entry)) is None:
                continue
            by_rank = newest.setdefault(operation.group, {})
            by_rank[rank] = max(by_rank.get(rank, 0), operation.number)
            if entry.get("retired") is False:
                pending.setdefault(operation.group, {}).setdefault(operation, []).append(rank)
    told = []
    for group, operations in sorted(pending.items()):
        first = min(operations, key=lambda one: one.number)
        late = [rank for rank, number in newest[group].items() if number < first.number]
        told.append(
            f"{ranks_in_words(operations[first])} in {first.name} number {first.number} of group {group} "
            f"({first.shapes or 'no tensor'}), "
            + (f"to which {ranks_in_words(late)} did not come" if late else "which all have come to that are known")
        )
    return told


def ranks_in_words(ranks: list[int]) -> str:
    """rank 3; ranks 0, 1, 2."""
    listed = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank {listed}" if len(ranks) == 1 else f"ranks {listed}"
