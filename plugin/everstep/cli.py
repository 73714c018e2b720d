"""The command line: dispatches `everstep COMMAND …`, nothing more.

Each command is a function whose parameters tyro parses, most of them in `commands`. Its module is imported only when
the command is given, so `everstep --help` answers at once.
"""

import difflib
import functools
import importlib.metadata
import inspect
import io
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import everstep
from everstep.run.directory import LaunchError
from everstep.run.exits import end_at_once

BROKEN_PIPE_EXIT = 141
"""Exit status that a shell reports for a command that died of SIGPIPE."""
INTERRUPTED_EXIT = 130
STACK = ("torch", "torchtitan", "torchft", "numpy", "tyro")


@dataclass(frozen=True)
class Command:
    """A command: its line in the usage, and the module of its function, which has the command's name."""

    what: str
    place: str
    rest: str = "none"
    """Who gets the arguments that it does not know: nobody ("none": they are errors), "torchtitan" or "sbatch"."""


COMMANDS = {
    "init": Command("write a config or Slurm script to start from", "commands.init"),
    "doctor": Command("check whether a config can run here", "commands.doctor", "torchtitan"),
    "run": Command("start a run on this machine", "commands.run", "torchtitan"),
    "scale": Command("change the number of groups of a live run", "commands.cluster"),
    "watch": Command("show a run while it goes", "commands.status"),
    "status": Command("show where a run is", "commands.status"),
    "stop": Command("stop a run cleanly", "commands.cluster"),
    "chaos": Command("inject faults into a live run", "chaos.command"),
    "report": Command("compute from its events what a run did", "commands.report"),
    "same": Command("compare two runs bit by bit", "commands.replay"),
    "replay": Command("compute a step again and compare its bits", "commands.replay"),
    "snapshots": Command("show what a start would restore from host memory", "commands.snapshots"),
    "pack": Command("make a token file from text", "commands.pack"),
    "submit": Command("submit a run to Slurm", "commands.cluster", "sbatch"),
    "agent": Command("run one replica group's workers; for batch jobs", "commands.agent", "torchtitan"),
    "lighthouse": Command("run a run's lighthouse; for batch jobs", "commands.cluster", "torchtitan"),
}


def _usage() -> str:
    lines = [f"  {name:<10} {command.what}" for name, command in COMMANDS.items()]
    return "\n".join(["usage: everstep COMMAND [arguments]", "", *lines, "", "everstep COMMAND --help says more."])


def _versions() -> str:
    found = [f"python {sys.version.split()[0]}"]
    for name in STACK:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            found.append(f"{name} is missing")
    return f"everstep {everstep.__version__} ({', '.join(found)})"


def _dispatch(args: Sequence[str]) -> int:
    name = args[0] if args else ""
    if name == "help" and len(args) > 1:
        name, args = args[1], [args[1], "--help"]
    if name in ("", "-h", "--help", "help"):
        print(f"Everstep {everstep.__version__}: pretraining with torchtitan that survives failures.\n\n{_usage()}")
        return 0 if name else 2
    if name in ("-V", "--version", "version"):
        print(_versions())
        return 0
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, 1)
        raise LaunchError(f"there is no command {name}{f', did you mean {near[0]}?' if near else '.'}\n\n{_usage()}")
    return _run(name, COMMANDS[name], args[1:])


def _run(name: str, command: Command, args: Sequence[str]) -> int:
    from everstep.config.errors import ConfigError
    from everstep.config.grammar import parse

    function = getattr(importlib.import_module(f"everstep.{command.place}"), name)
    try:
        values, flags = parse(_arguments_of(function), args, prog=f"everstep {name}")
        _refuse_strangers(command, values, flags)
        for key, value in values.items():
            if value == Path() and ("" in args or f"--{key.replace('_', '-')}=" in args):  # it would be this folder
                raise LaunchError(f"{key.replace('_', '-')} is empty: give a path")
        return function(**values, **({} if command.rest == "none" else {"flags": flags}))
    except ConfigError as error:
        raise LaunchError(str(error)) from None


def _arguments_of(function: Callable[..., int]) -> Callable[..., dict[str, Any]]:
    """Return a function with a command's parameters, all but `flags`, that returns its arguments by name."""

    @functools.wraps(function)
    def arguments(**values: Any) -> dict[str, Any]:
        return values

    signature = inspect.signature(function)
    own = [parameter for name, parameter in signature.parameters.items() if name != "flags"]
    vars(arguments)["__signature__"] = signature.replace(parameters=own)
    return arguments


def _refuse_strangers(command: Command, names: Iterable[str], flags: Sequence[str]) -> None:
    """Raise LaunchError for arguments that nobody takes: torchtitan's flags have a section; sbatch's pass unchecked."""
    if command.rest == "sbatch":
        return
    from everstep.config.grammar import ROOT_KEYS, is_flag

    own = [name.rstrip("_").replace("_", "-") for name in names]
    for position, flag in enumerate(flags):
        key = flag.lstrip("-").partition("=")[0]
        if not is_flag(flag):
            if command.rest == "none" or position == 0:
                raise LaunchError(f"unknown argument {flag}; see --help.")
        elif command.rest == "none" or ("." not in key and key.replace("-", "_") not in ROOT_KEYS):
            near = difflib.get_close_matches(key, own, 1)
            raise LaunchError(f"there is no flag {flag}{f', did you mean --{near[0]}?' if near else '; see --help.'}")


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of the `everstep` command; exits with the command's status."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # as on stderr, whatever the locale can write
    try:
        status = _dispatch(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()
    except LaunchError as error:
        print(f"everstep: {error}", file=sys.stderr)
        status = 2
    except KeyboardInterrupt:
        status = INTERRUPTED_EXIT
    except BrokenPipeError:
        # The reader has closed the pipe. Flush what is left to /dev/null at exit, as the pipe would raise again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = BROKEN_PIPE_EXIT
    except OSError as error:
        if error.filename is None:
            raise
        print(f"everstep: {error.filename}: {error.strerror}", file=sys.stderr)
        status = 2
    if argv is None and "triton" in sys.modules:
        end_at_once(status)
    sys.exit(status)


if __name__ == "__main__":
    main()
