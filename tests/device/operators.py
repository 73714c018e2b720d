"""Computes some things on the device "late" and on the CPU; fails at the first that differs."""

import os

import torch
import torch.nn.functional as F

import late

A = torch.arange(24, dtype=torch.float32).reshape(4, 6).sin()


def grad_of(loss, *given: torch.Tensor) -> list[torch.Tensor]:
    given = [one.detach().clone().requires_grad_() for one in given]
    return list(torch.autograd.grad(loss(*given), given))


def adam(a: torch.Tensor) -> torch.Tensor:
    param = torch.nn.Parameter(a.clone())
    optimizer = torch.optim.AdamW([param], foreach=True)
    for _ in range(3):
        param.grad = param.detach() * 2
        torch.nn.utils.clip_grad_norm_([param], 0.5)
        optimizer.step()
    return param.detach()


def drawn(a: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(7)
    return torch.stack([torch.randn(3, device=a.device), torch.rand(3, device=a.device)])


def grown_and_shrunk(a: torch.Tensor) -> torch.Tensor:
    tensor = a.clone()
    size = tensor.untyped_storage().size()
    tensor.untyped_storage().resize_(2 * size)
    tensor.untyped_storage().resize_(size)
    return tensor


COMPUTED = {
    "views": lambda a: [a.view(6, 4)[:, 1], a.t(), a.unfold(1, 2, 2), a.expand(2, 4, 6), a[1:, ::2], *a.split(3, 1)],
    "complex": lambda a: torch.view_as_real(torch.view_as_complex(a.view(4, 3, 2)).conj() * 2j),
    "conjugate copied": lambda a: torch.polar(a, a).conj().clone(),
    "in place, through a view": lambda a: a.clone()[1:].add_(1).mul_(2),
    "an output that grows": lambda a: torch.cat([a, a], out=torch.empty(0, device=a.device)),
    "by values": lambda a: [a[a > 0], a.nonzero(), torch.unique(a > 0), a.masked_select(a < 0)],
    "sorted": lambda a: list(a.sort()) + list(a.topk(2)),
    "index": lambda a: a.index_put((torch.tensor([0, 2], device=a.device),), a[:2], accumulate=True),
    "types": lambda a: [a.bfloat16() @ a.bfloat16().t(), a.double().sum(0), (a > 0).sum(), a.long()],
    "scalars": lambda a: torch.tensor([a.sum().item(), float(a[0, 1]), a.equal(a.clone()), a.isnan().any().item()]),
    "attention": lambda a: grad_of(  # in float64: on a CPU it is another algorithm
        lambda q, k: F.scaled_dot_product_attention(q[None], k[None], k[None], is_causal=True).square().sum(),
        a.double(),
        a.double() * 2,
    ),
    "loss": lambda a: grad_of(lambda x: F.cross_entropy(x, torch.arange(4, device=x.device)), a),
    "norms": lambda a: grad_of(lambda x: (F.rms_norm(x, (6,)) * F.layer_norm(x, (6,)) * F.silu(x)).sum(), a),
    "embedding": lambda a: grad_of(lambda x: F.embedding(torch.tensor([1, 1, 3], device=x.device), x).sum(), a),
    "optimizer": adam,
    "random numbers": drawn,
    "storage": grown_and_shrunk,
    "copies": lambda a: a.to("cpu", non_blocking=False).to(a.device, non_blocking=True).to(torch.float16),
}


def flat(found) -> list[torch.Tensor]:
    return list(found) if isinstance(found, (list, tuple)) else [found]


def main() -> None:
    for name, compute in COMPUTED.items():
        ours, theirs = flat(compute(A.to("late"))), flat(compute(A))
        assert len(ours) == len(theirs), name
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(
                one.cpu(), other, rtol=1e-5, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
            )
    assert torch.cuda.is_available() is False
    assert torch.accelerator.current_accelerator().type == "late"
    with torch.autocast("late", dtype=torch.bfloat16):
        assert (A.to("late") @ A.to("late").t()).dtype is torch.bfloat16
    state = torch.late.get_rng_state()
    first = torch.rand(3, device="late")
    torch.late.set_rng_state(state)
    assert torch.rand(3, device="late").equal(first)
    assert torch.accelerator.memory_allocated() > 0
    assert torch.empty(4, pin_memory=True).is_pinned()
    late_work_is_late()
    assert not late.races(), late.races()
    try:
        torch.mm(A.to("late"), A.to("late")[:5, :5])
    except RuntimeError:
        pass
    else:
        raise AssertionError("shapes that do not fit were not refused")
    a_copy_of_the_process_cannot_use_it()


def late_work_is_late() -> None:
    """A call returns before its work is done, an event is reached after it."""
    tensor, event = torch.zeros(8, device="late"), torch.Event(device="late")
    torch.accelerator.synchronize()
    with late.held():
        tensor.add_(1)
        event.record()
        assert not event.query()
        assert torch.ops.late.inside(tensor).sum() == 0
    event.synchronize()
    assert torch.ops.late.inside(tensor).sum() == 8


def a_copy_of_the_process_cannot_use_it() -> None:
    if (pid := os.fork()) == 0:
        try:
            assert late._is_in_bad_fork()
            torch.ones(3, device="late")
        except RuntimeError as error:
            os._exit(0 if "forked" in str(error) else 1)
        finally:
            os._exit(2)
    assert os.waitpid(pid, 0)[1] == 0


if __name__ == "__main__":
    main()
