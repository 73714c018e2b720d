"""torchtitan: the trainer, its state, checkpoints, checked attention, config door and CPU stand-in.

The only room that imports torchtitan.
"""
