"""Mutation testing of the simulation (`scripts/simulate --mutants 100`): changes one place in the code that it runs,
and finds the first seed that shows the change.

A mutant replaces one node of a file's syntax tree (`changes`), drawn evenly from all places where this is possible,
except those that only report (events, messages, annotations). Each runs in its own process, over a copy of the package.
If no seed shows a mutant, read it: it may change nothing that can be seen, be left to the tests of its room, or be
missed by the simulation. If its runs differ from the original's, it is not equivalent to the original.
"""

import ast
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from run.forked import ran

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "plugin" / "everstep"
ROOMS = ("step", "quorum")
SEED_S = 60
"""Seconds of processor time after which a run is taken for endless."""
NOT_SIMULATED = {f"step/{name}.py" for name in ("exact", "reduction")} | {
    f"quorum/{name}.py" for name in ("communicator", "interface", "lighthouse", "private", "ranks", "streams")
}
"""Files that no simulated run executes."""

_OTHER = {ast.Lt: ast.LtE, ast.Gt: ast.GtE, ast.Eq: ast.NotEq, ast.Is: ast.IsNot, ast.In: ast.NotIn}
TURNED: dict[type[ast.cmpop], type[ast.cmpop]] = {**_OTHER, **{turned: one for one, turned in _OTHER.items()}}
LIKE = {"min": "max", "max": "min", "any": "all", "all": "any", "union": "intersection", "intersection": "union"}
_LIKE: dict[type[ast.operator], type[ast.operator]] = {ast.Add: ast.Sub, ast.BitOr: ast.BitAnd}
LIKE_OPERATORS = {**_LIKE, **{other: one for one, other in _LIKE.items()}}
TELLS = {"emit", "debug", "info", "warning", "error", "exception"}
"""Names of methods that only report."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """A replacement of the text between two byte offsets of a file."""

    file: str
    line: int
    start: int
    end: int
    old: str
    new: str

    def __str__(self) -> str:
        return f"{self.file}: {self.old} -> {self.new}"

    def apply(self, package: Path) -> None:
        path = package / self.file
        text = path.read_bytes()
        path.write_bytes(text[: self.start] + self.new.encode() + text[self.end :])


def changes(node: ast.AST) -> Iterator[ast.AST | str]:
    """Yield the nodes, or the text, that may replace a node."""
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
    """Yield the nodes of a tree that decide or act."""
    match node:
        case ast.Expr(value=ast.Constant()) | ast.Raise() | ast.Import() | ast.ImportFrom() | ast.JoinedStr():
            return
        case ast.Call(func=ast.Attribute(attr=name)) | ast.Expr(ast.Call(ast.Attribute(attr=name))) if name in TELLS:
            return
        case ast.AnnAssign(value=value):
            if value is not None:
                yield from places(value)
            return
        case ast.ClassDef():
            node.decorator_list = []  # `frozen` and `slots` change nothing in code that is right
        case ast.FunctionDef(body=body, args=args):
            for part in (*body, *args.defaults, *filter(None, args.kw_defaults)):
                yield from places(part)
            return
    yield node
    for child in ast.iter_child_nodes(node):
        yield from places(child)


def mutants_of(name: str) -> list[Mutant]:
    text = (PACKAGE / name).read_bytes()
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
            found.append(Mutant(name, node.lineno, start, end, old, new))
    return found


def drawn(count: int, draw: int, rooms: Sequence[str] = ROOMS) -> list[Mutant]:
    """Return `count` mutants, each with the same chance."""
    files = sorted(path for room in rooms for path in (PACKAGE / room).glob("*.py"))
    names = [name for path in files if (name := str(path.relative_to(PACKAGE))) not in NOT_SIMULATED]
    every = [mutant for name in names for mutant in mutants_of(name)]
    return random.Random(draw).sample(every, min(count, len(every)))


def search(package_root: str, most: int) -> str:
    """Return "SEED | HOW" of the first seed that breaks the promise with this package, or at which the costs of all so
    far differ from the recorded ones; SAME if all seeds cost exactly what is recorded; else "". VARIANTS come after the
    first seeds, and are left out if `most` is less than these. Runs in a process of its own."""
    for name in [name for name in sys.modules if name.partition(".")[0] in ("everstep", "simulation")]:
        del sys.modules[name]
    sys.path.insert(0, package_root)
    seed = 0

    def hung(*_: object) -> None:
        raise TimeoutError

    signal.signal(signal.SIGVTALRM, hung)
    try:
        from simulation import costs
        from simulation.world import DEFAULT, SEEDS, VARIANTS, Settings, simulate

        runs: dict[str, list[Counter[str]]] = defaultdict(list)
        first = costs.PARTS[1]
        variants = VARIANTS if most >= first else {}
        begun = [(DEFAULT, SEEDS[: min(first, most)], Settings()), *((name, *how) for name, how in variants.items())]
        for name, seeds, settings in (*begun, (DEFAULT, SEEDS[first:most], Settings())):
            for seed in seeds:
                signal.setitimer(signal.ITIMER_VIRTUAL, SEED_S)
                outcome = simulate(seed, settings)
                signal.setitimer(signal.ITIMER_VIRTUAL, 0)
                if outcome.violations:
                    return f"{seed} | {outcome.violations[0].kind}"
                runs[name].append(outcome.costs)
            if other := costs.changed(name, runs[name]):
                return f"{seed} | {other[0]}"
        if costs.same(runs):
            return SAME
    except TimeoutError:
        return f"{seed} | does not end"
    except Exception as error:  # noqa: BLE001 whatever a changed program raises shows the change
        return f"{seed} | {type(error).__name__}"
    return ""


SAME = "none | the same runs"
SEARCH = "import sys; from simulation import mutants; print(mutants.search(sys.argv[1], int(sys.argv[2])))"


def attempt(mutant: Mutant, most: int) -> str:
    """Return the result of `search` for a copy of the package with this change."""
    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder) / "everstep"
        shutil.copytree(PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__"))
        mutant.apply(package)
        done = ran([sys.executable, "-c", SEARCH, folder, most], timeout=None)
        return done.stdout.strip() if done.returncode == 0 else "0 | ends the process"


def campaign(count: int, draw: int, most: int, jobs: int) -> None:
    """Try mutants and print a line for each."""
    begun, caught, chosen = time.monotonic(), 0, drawn(count, draw)
    print("| # | file | line | change | first seed | seen as |\n|---|---|---|---|---|---|", flush=True)
    with ThreadPoolExecutor(jobs) as pool:
        said = pool.map(lambda mutant: attempt(mutant, most), chosen)
        for number, (mutant, verdict) in enumerate(zip(chosen, said, strict=True), 1):
            caught += verdict not in ("", SAME)
            change = f"`{mutant.old}` → `{mutant.new}`".replace("|", "\\|")
            print(
                f"| {number} | {mutant.file} | {mutant.line} | {change} | {verdict or 'none | other runs'} |",
                flush=True,
            )
    took_s = time.monotonic() - begun
    print(f"{caught} of {len(chosen)} mutants caught (draw {draw}, {most} seeds at most, {took_s:.0f} s)")
