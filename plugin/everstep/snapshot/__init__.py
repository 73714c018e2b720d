"""CPU snapshots: states of committed steps in host memory, verified and coded, in processes that outlive the trainers.

A trainer's `copier` copies its group's part of the state into the `segment`, a directory of files on tmpfs. A `keeper`,
one process per run and host in a separate session, verifies what was published, codes parity with the keepers of the
other groups, and serves parts and parity over TCP. After a failure, `sources` decides from what the keepers hold which
step can be restored, and `recovery` restores it. Nothing here imports torchtitan or torchft; the keeper does not even
import torch.
"""
