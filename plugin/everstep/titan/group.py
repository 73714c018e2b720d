"""Collectives over the ranks of one replica group, which is torch's world, on the trainer's backend."""

import hmac
import secrets
from typing import Any

import torch
import torch.distributed as dist

from everstep.run import typed

NONCE_BYTES = 32


def _device() -> torch.device:
    """Return the device on which the backend needs the tensors of a collective."""
    accelerator = torch.accelerator.current_accelerator()
    return torch.device("cpu") if dist.get_backend() == "gloo" or accelerator is None else accelerator


def all_in_group(flag: bool) -> bool:
    """Return whether `flag` is true on all ranks of the group; a collective of the group."""
    return bool(least_in_group(flag)[0])


def least_in_group(*values: int) -> list[int]:
    """Return each value's minimum over the group's ranks; of a flag, whether all have it. A collective of the group."""
    if dist.get_world_size() == 1:
        return list(values)
    least = torch.tensor(values, dtype=torch.int64, device=_device())
    dist.all_reduce(least, op=dist.ReduceOp.MIN)
    return least.tolist()


def sum_in_group(value: int) -> int:
    """Return the sum of an integer (or of 0/1 flags) over the group's ranks, modulo 2^62. A collective of the group."""
    if dist.get_world_size() > 1:
        total = torch.tensor([value], dtype=torch.int64, device=_device())
        dist.all_reduce(total)
        value = int(total)
    return value & (1 << 62) - 1


def gather_json(value: Any) -> list[Any]:
    """Return every rank's value, by rank; a collective of the group. `all_gather_object` would unpickle what comes."""
    mine = typed.dumps(value)
    lengths = [int.from_bytes(length) for length in _everyones(len(mine).to_bytes(8))]
    everyone = _everyones(mine.ljust(max(lengths), b"\0"))
    return [typed.loads(said[:length]) for said, length in zip(everyone, lengths, strict=True)]


def require_members(token: bytes) -> None:
    """Check that every rank of the group has the run's token: each answers everyone's random numbers with an HMAC under
    it. This has to be the group's first collective. Any process that reaches torch's store in time can take a rank's
    place, and what a rank sends later is trusted: checkpoint plans are even unpickled.

    Raises:
        RuntimeError: the answer of a rank is wrong, so a process without the token has its place.
    """
    ranks = dist.get_world_size()
    if ranks == 1:
        return
    asked = b"".join(_everyones(secrets.token_bytes(NONCE_BYTES)))
    proofs = [hmac.digest(token, b"rank %d of %d" % (rank, ranks) + asked, "sha256") for rank in range(ranks)]
    answers = _everyones(proofs[dist.get_rank()])
    if strangers := [rank for rank in range(ranks) if not hmac.compare_digest(answers[rank], proofs[rank])]:
        places = ", ".join(map(str, strangers))
        raise RuntimeError(
            f"a process without the run's token has the place of rank {places} in this group: another program connects "
            "to the run's ports, see docs/security.md"
        )


def _everyones(mine: bytes) -> list[bytes]:
    """Return every rank's bytes, by rank; all have the same length. A collective of the group."""
    sent = torch.frombuffer(bytearray(mine), dtype=torch.uint8).to(_device())
    received = [torch.empty_like(sent) for _ in range(dist.get_world_size())]
    dist.all_gather(received, sent)
    return [one.cpu().numpy().tobytes() for one in received]
