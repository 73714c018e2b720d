"""All that is built on torchtitan: the trainer, its state, checkpoints, checked attention, config and CPU stand-in.

The only room that imports torchtitan.
"""
