"""Builds the device's library, once for each state of its sources and of torch."""

import fcntl
import hashlib
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

HERE = Path(__file__).parent
CACHE = Path(sys.prefix) / "late"


def library() -> Path:
    """The built library; compiles it if these sources have not been compiled here yet. Raises RuntimeError with the
    compiler's own words, or with what is missing."""
    from torch import __version__

    sources = [*sorted(HERE.glob("*.h")), HERE / "late.cpp"]
    digest = hashlib.blake2b(__version__.encode(), digest_size=8)
    for source in sources:
        digest.update(source.read_bytes())
    target = CACHE / f"{digest.hexdigest()}.so"
    CACHE.mkdir(exist_ok=True)
    with open(CACHE / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            _compile(target)
    return target


def _compile(target: Path) -> None:
    from torch._C import _GLIBCXX_USE_CXX11_ABI
    from torch.utils import cpp_extension

    fresh = target.with_suffix(f".{os.getpid()}")
    includes = [*cpp_extension.include_paths(), sysconfig.get_path("include")]
    command = [os.environ.get("CXX", "g++"), "-std=c++20", "-O1", "-fPIC", "-shared", "-w", "-o", str(fresh)]
    command += [f"-D_GLIBCXX_USE_CXX11_ABI={int(_GLIBCXX_USE_CXX11_ABI)}", str(HERE / "late.cpp")]
    command += [word for path in includes for word in ("-isystem", path)]
    command += [f"-L{path}" for path in cpp_extension.library_paths()]
    command += ["-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise RuntimeError("the stand-in device needs a C++ compiler: install g++ and python3-dev") from None
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr[-4000:]}")
    os.replace(fresh, target)
