"""`everstep version`: what is installed."""

import importlib.metadata
import sys

import everstep

STACK = ("torch", "torchtitan", "torchft", "numpy", "tyro")


def versions() -> str:
    """Everstep's version, and those of the stack that it runs on."""
    found = [f"python {sys.version.split()[0]}"]
    for name in STACK:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            found.append(f"{name} is missing")
    return f"everstep {everstep.__version__} ({', '.join(found)})"
