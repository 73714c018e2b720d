"""Changes of one place in the protocol's code, drawn by a script, and the first seed whose run each of them spoils.

    scripts/simulate --mutants 100 [--draw 0] [--most 1000] [--jobs 2]

A mutant is one node of a file's syntax tree with another in its place: a comparison turned, a condition negated, `and`
for `or`, a constant moved by one, a call or an assignment left out, one of two like functions for the other. They are
drawn evenly over the places where such a change is possible; what only tells (events, messages, annotations) is no
place. Each runs in a process of its own, forked where torch is imported already, over a copy of the package. A change
that no seed shows is shown to the tests of its file (TESTS).

A mutant that nothing finds is either equivalent, and then EQUIVALENT says why, or missed.
"""

import ast
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "plugin" / "everstep"
ROOMS = ("step", "quorum", "semi")
SEED_S = 60
"""Of wall time: a run that takes longer does not end."""

QUIET = ["tests/simulation/test_simulation.py", "-k", "not mixed and not variant"]
TESTS = {
    "step/asking.py": QUIET,
    "step/decisions.py": ["tests/step/test_decisions.py"],
    "step/driver.py": ["tests/step/test_driver.py", *QUIET],
    "step/protocol.py": QUIET,
    "step/exact.py": ["tests/step/test_exact.py"],
    "step/holding.py": ["tests/step/test_audited_slots.py"],
    "step/ledger.py": ["tests/step/test_ledger.py", "tests/step/test_refusals.py", "tests/step/test_audited_slots.py"],
    "step/reduction.py": ["tests/step/test_reduction.py", "tests/step/test_exact.py"],
    "quorum/communicator.py": ["tests/quorum/test_process_group.py", "tests/quorum/test_private.py"],
    "quorum/gate.py": ["tests/quorum/test_gate.py", "tests/quorum/test_turns.py"],
    "quorum/heal.py": ["tests/quorum/test_heal.py", "tests/device/test_late.py"],
    "quorum/in_flight.py": ["tests/quorum/test_process_group.py", "tests/device/test_late.py"],
    "quorum/interface.py": ["tests/quorum/test_interface.py"],
    "quorum/lighthouse.py": ["tests/quorum/test_gate.py"],
    "quorum/membership.py": ["tests/quorum/test_membership.py"],
    "quorum/memory.py": ["tests/quorum/test_memory.py"],
    "quorum/notes.py": ["tests/quorum/test_membership.py"],
    "quorum/private.py": ["tests/quorum/test_private.py"],
    "quorum/process_group.py": ["tests/quorum/test_process_group.py"],
    "quorum/ranks.py": ["tests/step/test_processes.py"],
    "quorum/request.py": ["tests/step/test_quorum.py"],
    "quorum/streams.py": ["tests/device/test_late.py"],
    "quorum/reach.py": ["tests/quorum/test_process_group.py"],
    "quorum/watch.py": ["tests/quorum/test_watch.py"],
    "semi/outer.py": ["tests/semi/test_outer.py"],
    "semi/rounds.py": ["tests/semi/test_runs.py"],
    "semi/section.py": ["tests/semi/test_config.py"],
    "semi/worker_store.py": ["tests/semi/test_files.py"],
}
"""The tests of a file, which see a change that no seed has shown; QUIET: runs that meet one fault or none."""
NOT_SIMULATED = (
    "step/exact.py",
    "step/reduction.py",
    "quorum/communicator.py",
    "quorum/interface.py",
    "quorum/lighthouse.py",
    "quorum/memory.py",
    "quorum/notes.py",
    "quorum/private.py",
    "quorum/ranks.py",
    "quorum/streams.py",
    "semi/",
)
"""Files, or rooms, that no simulated run executes."""
TESTS_S = 240
"""Of wall time for those."""

TURNED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
LIKE = {"min": "max", "max": "min", "any": "all", "all": "any", "union": "intersection", "intersection": "union"}
LIKE_OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.BitOr: ast.BitAnd,
    ast.BitAnd: ast.BitOr,
}
TELLS = {"emit", "debug", "info", "warning", "error", "exception"}
"""Calls that only tell somebody."""

AT_EXIT, ONLY_LATER = "matters when a process ends", "only how long something takes or is waited for"
ONLY_TOLD = "is only told"
EQUIVALENT: dict[tuple[str, str, str], str] = {
    ("step/attempt.py", "@dataclass(frozen=True, slots=True)", "False"): "nobody assigns to it",
    ("quorum/process_group.py", 'super().__init__(name="connect", daemon=True)', "False"): AT_EXIT,
    ("step/reduction.py", "bucket.additions[index] += 1", "2"): "counts are compared with each other",
    ("step/reduction.py", "bucket.additions = [0] * len(bucket.params)", "1"): "counts are compared with each other",
    ("step/reduction.py", "self._started = 0", "pass"): "is set before it is read",
    (
        "step/ledger.py",
        'return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 2',
        "3",
    ): "61 bits tell histories apart as well",
    ("quorum/membership.py", "ASK_AGAIN_S = 0.1", "1.1"): ONLY_LATER,
    ("quorum/membership.py", "HEARTBEAT_S, HEARTBEATS = 0.5, 4", "1.5"): ONLY_LATER,
    (
        "quorum/membership.py",
        "if time.monotonic() > deadline - ASK_AGAIN_S or self._left.wait(ASK_AGAIN_S):",
        "(time.monotonic() >= deadline - ASK_AGAIN_S)",
    ): ONLY_LATER,
    ("quorum/gate.py", "TELL_EVERY_S = 60.0", "61.0"): ONLY_TOLD,
    ("quorum/gate.py", "self._refused += 1", "2"): ONLY_TOLD,
    ("quorum/gate.py", "heartbeat_timeout_s: float = 2.0", "3.0"): "all that make rules say it",
    ("quorum/watch.py", "with ThreadPoolExecutor(min(len(peers), CONNECTING) or 1) as pool:", "2"): ONLY_LATER,
    (
        "quorum/heal.py",
        "if self._open is not None and self._of == of:",
        "(self._open is None)",
    ): "the same state is copied once more",
    ("step/protocol.py", 'self._files.beat("vote", step)', "pass"): "one of several signs of life",
    ("step/protocol.py", "digest = tally.digest() if tally is not None else 0", "1"): "no tally has that digest",
    ("step/reduction.py", "LARGEST_PART = LARGEST / 1000", "1001"): "numbers beyond it are so by magnitudes",
    ("step/reduction.py", "size = 0", "1"): "only where a bucket is cut",
}
"""File, line and what is put there → why no run can show the change."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """Text between two offsets of a file (bytes) replaced by another."""

    file: str
    line: int
    start: int
    end: int
    old: str
    new: str
    text: str
    """The line that it begins in."""

    @property
    def key(self) -> tuple[str, str, str]:
        return self.file, self.text, self.new

    def __str__(self) -> str:
        return f"{self.file}: {self.old} -> {self.new}"

    def apply(self, package: Path) -> None:
        path = package / self.file
        text = path.read_bytes()
        path.write_bytes(text[: self.start] + self.new.encode() + text[self.end :])


def changes(node: ast.AST) -> Iterator[ast.AST | str]:
    """What may stand in a node's place."""
    match node:
        case ast.Compare(left=left, ops=[op], comparators=others) if type(op) in TURNED:
            yield ast.Compare(left, [TURNED[type(op)]()], others)
        case ast.BoolOp(op=op, values=values):
            yield ast.BoolOp(ast.Or() if isinstance(op, ast.And) else ast.And(), values)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield operand
        case ast.IfExp(test=test, body=body, orelse=orelse):
            yield ast.IfExp(test, orelse, body)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in LIKE_OPERATORS:
            yield ast.BinOp(left, LIKE_OPERATORS[type(op)](), right)
        case ast.Constant(value=bool(value)):
            yield ast.Constant(not value)
        case ast.Constant(value=int(value) | float(value)):
            yield ast.Constant(value + 1)
        case ast.Name(id=name, ctx=ast.Load()) if name in LIKE:
            yield ast.Name(LIKE[name])
        case ast.Expr(value=ast.Call()) | ast.AugAssign() | ast.Delete() | ast.Continue() | ast.Break():
            yield "pass"
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield "pass"


def places(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a tree that decide or act."""
    match node:
        case ast.Expr(value=ast.Constant()) | ast.Raise() | ast.Import() | ast.ImportFrom() | ast.JoinedStr():
            return
        case ast.Call(func=ast.Attribute(attr=name)) if name in TELLS:
            return
        case ast.Expr(value=ast.Call(func=ast.Attribute(attr=name))) if name in TELLS:
            return
        case ast.AnnAssign(value=value):
            if value is not None:
                yield from places(value)
            return
        case ast.FunctionDef(body=body, args=args):
            for part in (*body, *args.defaults, *filter(None, args.kw_defaults)):
                yield from places(part)
            return
    yield node
    for child in ast.iter_child_nodes(node):
        yield from places(child)


def mutants_of(path: Path, name: str) -> list[Mutant]:
    text = path.read_bytes()
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    found = []
    for node in places(ast.parse(text)):
        for change in changes(node):
            start = starts[node.lineno - 1] + node.col_offset
            end = starts[node.end_lineno - 1] + node.end_col_offset
            new = change if isinstance(change, str) else ast.unparse(ast.fix_missing_locations(change))
            old = text[start:end].decode()
            brackets = isinstance(node, ast.expr) and not isinstance(node, ast.Constant | ast.Name)
            old, new = " ".join(old.split()), f"({new})" if brackets else new
            line = text[starts[node.lineno - 1] : starts[node.lineno]].decode().strip()
            found.append(Mutant(name, node.lineno, start, end, old, new, line))
    return found


def drawn(count: int, draw: int, rooms: Sequence[str] = ROOMS) -> list[Mutant]:
    """So many mutants, each place with the same chance."""
    files = sorted(path for room in rooms for path in (PACKAGE / room).glob("*.py"))
    every = [mutant for path in files for mutant in mutants_of(path, str(path.relative_to(PACKAGE)))]
    return random.Random(draw).sample(every, min(count, len(every)))


def search(package_root: Path, most: int) -> str:
    """In a child: the first seed that breaks the promise with this package, and how; "" if none does."""
    for name in [name for name in sys.modules if name.partition(".")[0] in ("everstep", "simulation")]:
        del sys.modules[name]
    sys.path.insert(0, str(package_root))
    seed = 0

    def hung(*_: object) -> None:
        raise TimeoutError

    signal.signal(signal.SIGALRM, hung)
    try:
        from simulation.faults import REFUSALS
        from simulation.world import Settings, simulate

        kinds = Settings().kinds, (*REFUSALS, "nan", "kill", "cut", "flip")
        for seed in range(most):
            signal.alarm(SEED_S)
            outcome = simulate(seed, Settings(kinds=kinds[seed % 2]))
            signal.alarm(0)
            if outcome.violations:
                return f"{seed} | {outcome.violations[0].kind}"
    except TimeoutError:
        return f"{seed} | does not end"
    except Exception as error:  # noqa: BLE001 whatever a changed program raises shows the change
        return f"{seed} | {type(error).__name__}"
    return ""


def attempt(mutant: Mutant, most: int) -> str:
    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder) / "everstep"
        shutil.copytree(PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__"))
        mutant.apply(package)
        simulated = not mutant.file.startswith(NOT_SIMULATED)
        return (_searched(folder, most) if simulated else "") or _tested(mutant, folder)


def _searched(folder: str, most: int) -> str:
    """What `search` says of the package in a folder, from a process of its own."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        verdict = "0 | ends the process"
        try:
            with open(os.devnull, "w") as nothing:
                os.dup2(nothing.fileno(), 1)
                os.dup2(nothing.fileno(), 2)
            verdict = search(Path(folder), most)
        finally:
            os.write(writing, verdict.encode())
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as said:
        verdict = said.read()
    os.waitpid(child, 0)
    return verdict


def _tested(mutant: Mutant, folder: str) -> str:
    """What the tests of a mutant's file say, in the form of `search`."""
    tests = TESTS.get(mutant.file, [])
    if not tests:
        return ""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([folder, str(ROOT / "tests")])}
    try:
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, check=False, timeout=TESTS_S)
    except subprocess.TimeoutExpired:
        return "tests | does not end"
    return f"tests | {tests[0]}" if done.returncode else ""


def campaign(count: int, draw: int, most: int, jobs: int) -> bool:
    """Try mutants and print a line for each; whether 90 % of those that are not equivalent were caught."""
    import torch  # noqa: F401 before the forks: it takes seconds
    import torchft  # noqa: F401

    begun, verdicts = time.monotonic(), Counter()
    chosen = drawn(count, draw)
    print("| # | file | line | change | first seed | seen as |\n|---|---|---|---|---|---|", flush=True)
    with ThreadPoolExecutor(jobs) as pool:
        for number, (mutant, said) in enumerate(
            zip(chosen, pool.map(lambda mutant: attempt(mutant, most), chosen), strict=True), 1
        ):
            seed, _, kind = said.partition(" | ")
            if not said:
                seed, kind = ("equivalent", EQUIVALENT[mutant.key]) if mutant.key in EQUIVALENT else ("none", "")
            verdicts["caught" if said else "equivalent" if kind else "missed"] += 1
            change = f"`{mutant.old}` → `{mutant.new}`".replace("|", "\\|")
            print(f"| {number} | {mutant.file} | {mutant.line} | {change} | {seed} | {kind} |", flush=True)
    asked = verdicts["caught"] + verdicts["missed"]
    print(
        f"{len(chosen)} mutants (draw {draw}), {most} seeds at most: {verdicts['caught']} of {asked} caught, "
        f"{verdicts['equivalent']} equivalent, {time.monotonic() - begun:.0f} s"
    )
    return verdicts["caught"] >= 0.9 * asked
