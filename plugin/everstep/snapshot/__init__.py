"""CPU snapshots that outlive the trainer: every committed step's state in host memory, coded and verified.

A trainer's `copier` copies its group's part of the state into the `segment`, files on tmpfs. A `keeper`, one
process a run and host in a session of its own, verifies what was published, codes parity with the other
groups' keepers and serves both over TCP. After a failure `sources` decides from what the keepers hold which
step can be restored, and `recovery` does it. Nothing here imports torchtitan or torchft; the keeper does not
even import torch.
"""
