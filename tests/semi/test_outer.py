"""The arithmetic of rounds, without any trainer."""

import torch

from everstep.semi.outer import outer_step
from everstep.semi.section import SemiSync


def test_local_sgd_ends_where_the_mean_of_its_workers_is():
    theta, workers = torch.ones(4), [torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([5.0, 0.0, -1.0, 2.0])]
    change = torch.stack([theta - worker for worker in workers]).mean(0)
    outer_step(SemiSync(method="local_sgd", outer_lr=0.1), [theta], [change], [])
    torch.testing.assert_close(theta, torch.tensor([3.0, 1.0, 1.0, 3.0]))
