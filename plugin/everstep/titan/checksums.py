"""Checksums of the files of checkpoints on disk: a bit that flips there must not change the loss curve in silence.

Each rank writes beside each of its files one of the same name and `SUFFIX`, before the checkpoint gets its name. Files
without one, such as those of torchtitan alone, in Hugging Face's format or on object storage, are not verified.
"""

import errno
import hashlib
import re
from pathlib import Path
from typing import Any

import torch.distributed as dist
import xxhash
from torch.distributed.checkpoint import FileSystemWriter

from everstep.foreign import replace
from everstep.run.files import open_regular, write_whole
from everstep.titan.group import gather_json

SUFFIX = ".xxh3"
DIGITS = 16
DAMAGE = (errno.ENOENT, errno.EIO, errno.EBADMSG, errno.EUCLEAN, errno.EINVAL, errno.EISDIR)
"""Errors of a file that is missing, cannot be read or is no file. Others, such as those of a file server that does not
answer, end this start of the group, and the next may read the file."""


def write_checksums() -> None:
    """Have torch's writer of checkpoint files write checksums too. A second call does nothing."""
    write, finish = FileSystemWriter.write_data, FileSystemWriter.finish
    if write.__name__ == "write_data_and_checksums":
        return

    def write_data_and_checksums(writer: Any, *args: Any) -> Any:
        written = write(writer, *args)
        for name in {result.storage_data.relative_path for result in written.wait()}:
            _write_checksum(Path(writer.path) / name)
        return written

    def finish_with_checksum(writer: Any, *args: Any, **named: Any) -> None:
        finish(writer, *args, **named)
        if (file := Path(writer.path) / ".metadata").exists():
            _write_checksum(file)

    replace(FileSystemWriter, "write_data", write_data_and_checksums)
    replace(FileSystemWriter, "finish", finish_with_checksum)


def damaged_file(folder: Path | None) -> str:
    """Return a file of a checkpoint or of its parts that is missing, cannot be read, or has another checksum; "" if
    there is none, and for None. Each rank reads some of the files that rank 0 lists. A collective of the group. Raises
    OSError if whether a file is damaged cannot be known."""
    listed = [] if folder is None else [str(path.relative_to(folder)) for path in sorted(folder.rglob(f"*{SUFFIX}"))]
    mine = gather_json(listed)[0][dist.get_rank() :: dist.get_world_size()]
    names = (name.removesuffix(SUFFIX) for name in mine)
    damaged = (name for name in names if folder is None or not _is_whole(folder / name))
    return next(filter(None, gather_json(next(damaged, ""))), "")


def is_damaged(file: Path) -> bool:
    """Return whether a file has another checksum than the one beside it; False if either is missing. Raises OSError if
    that cannot be known."""
    return _beside(file).exists() and not _is_whole(file) and file.exists()


def _is_whole(file: Path) -> bool:
    try:
        with open_regular(_beside(file)) as checksum:  # or a link, as in a checkpoint that was copied as links
            told = checksum.read(DIGITS + 1).decode(errors="replace")
        if not re.fullmatch(f"[0-9a-f]{{{DIGITS}}}", told):  # of a host that lost power
            return True
        return _digest(file) == told
    except OSError as error:
        if error.errno not in DAMAGE:
            raise
        return False


def _write_checksum(file: Path) -> None:
    write_whole(_beside(file), _digest(file).encode())


def _beside(file: Path) -> Path:
    return file.with_name(file.name + SUFFIX)


def _digest(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, xxhash.xxh3_64).hexdigest()
