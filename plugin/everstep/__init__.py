"""Everstep: pretraining with torchtitan that nothing stops."""

__version__ = "0.1.0"
