"""The step protocol: how the groups of a run make each optimizer step together.

It reaches the trainer and the run directory through `everstep.step.interfaces`, other groups through `everstep.quorum`.
"""
