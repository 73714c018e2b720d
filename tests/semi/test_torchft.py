"""Without failures, rounds are those of torchft's own DiLoCo."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import torch
from torch.distributed import TCPStore
from torchft.coordination import LighthouseServer
from torchft.local_sgd import DiLoCo
from torchft.manager import Manager
from torchft.process_group import ProcessGroupGloo

from everstep.semi.outer import OuterSGD
from everstep.semi.rounds import steps_of
from everstep.semi.section import SemiSync

WORKERS, SYNC_STEPS, ROUNDS = 2, 4, 5
PATIENCE = timedelta(seconds=300)


def model():
    generator = torch.Generator().manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3))
    with torch.no_grad():
        for param in net.parameters():
            param.copy_(torch.randn(param.shape, generator=generator) * 0.3)
    return net


def adam(net):
    return torch.optim.AdamW(net.parameters(), lr=1e-2, eps=1e-5, weight_decay=0.1)


def gradients(net, worker, step):
    """Those of a worker's batch of a step."""
    generator = torch.Generator().manual_seed(1000 * worker + step)
    inputs, targets = torch.randn(8, 6, generator=generator), torch.randn(8, 3, generator=generator)
    net.zero_grad()
    torch.nn.functional.mse_loss(net(inputs), targets).backward()


def torchfts(worker, lighthouse):
    """A replica's parameters after the last round of torchft."""
    net = model()
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=PATIENCE),
        load_state_dict=net.load_state_dict,
        state_dict=net.state_dict,
        min_replica_size=WORKERS,
        use_async_quorum=False,
        init_sync=False,
        replica_id=f"worker-{worker}",
        store_addr="127.0.0.1",
        store_port=store.port,
        rank=0,
        world_size=1,
        lighthouse_addr=lighthouse,
        timeout=PATIENCE,
        quorum_timeout=PATIENCE,
        connect_timeout=PATIENCE,
    )
    try:
        inner = adam(net)
        outer = torch.optim.SGD(net.parameters(), lr=0.7, momentum=0.9, nesterov=True)
        with DiLoCo(manager, [net], inner, outer, sync_every=SYNC_STEPS):
            for step in range(1, ROUNDS * SYNC_STEPS + 1):
                gradients(net, worker, step)
                inner.step()
        assert manager.current_step() == ROUNDS
        return [param.detach().clone() for param in net.parameters()]
    finally:
        manager.shutdown(wait=False)


def ours():
    """The same in one thread, with the outer step of this package."""
    net = model()
    theta = [param.detach().clone() for param in net.parameters()]
    buffers = [torch.zeros_like(param) for param in theta]
    inner = [None] * WORKERS
    for round_ in range(1, ROUNDS + 1):
        changed = [torch.zeros_like(param) for param in theta]
        for worker in range(WORKERS):
            with torch.no_grad():
                for param, begin in zip(net.parameters(), theta, strict=True):
                    param.copy_(begin)
            optimizer = adam(net)
            if inner[worker] is not None:
                optimizer.load_state_dict(inner[worker])
            for step in steps_of(round_, SYNC_STEPS):
                gradients(net, worker, step)
                optimizer.step()
            inner[worker] = optimizer.state_dict()
            for change, begin, param in zip(changed, theta, net.parameters(), strict=True):
                change.add_(begin - param.detach())
        mean = [change / WORKERS for change in changed]
        OuterSGD.of(SemiSync(method="diloco")).step(theta, mean, buffers)
    return theta


def test_five_rounds_are_torchfts():
    lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=WORKERS, join_timeout_ms=60_000)
    try:
        with ThreadPoolExecutor(WORKERS) as threads:
            ends = list(threads.map(lambda worker: torchfts(worker, lighthouse.address()), range(WORKERS)))
    finally:
        lighthouse.shutdown()
    expected = ours()
    for end in ends:
        for theirs, mine in zip(end, expected, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-6)
    begun = [param.detach() for param in model().parameters()]
    assert max(float((param - begin).abs().max()) for param, begin in zip(expected, begun, strict=True)) > 0.1
