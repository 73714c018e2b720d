"""A rank's random states as byte strings, without pickle."""

import json
import random

import numpy as np
import torch


def random_states() -> dict[str, bytes]:
    """Python's, NumPy's, torch's CPU generator and that of the current device, if there is one in use."""
    version, internal, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    states = {
        "rng.python": json.dumps([version, list(internal), gauss]).encode(),
        "rng.numpy": json.dumps([name, np.asarray(keys).tolist(), position, has_gauss, cached]).encode(),
        "rng.torch": torch.get_rng_state().numpy().tobytes(),
    }
    if torch.cuda.is_initialized():
        states["rng.cuda"] = torch.cuda.get_rng_state().numpy().tobytes()
    return states


def set_random_states(states: dict[str, bytes]) -> None:
    """The inverse, for the states that are there; other keys are left alone."""
    if "rng.python" in states:
        version, internal, gauss = json.loads(states["rng.python"])
        random.setstate((version, tuple(internal), gauss))
    if "rng.numpy" in states:
        name, keys, *rest = json.loads(states["rng.numpy"])
        np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))
    if "rng.torch" in states:
        torch.set_rng_state(torch.frombuffer(bytearray(states["rng.torch"]), dtype=torch.uint8))
    if "rng.cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(torch.frombuffer(bytearray(states["rng.cuda"]), dtype=torch.uint8))
