"""How large a group's training state is, without making it: `python -m everstep.launch.estimate CONFIG [flags]`.

The model is built on the meta device. A process of its own, because it imports torchtitan; `everstep doctor` starts it.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from everstep.config.errors import ConfigError

ADAM_STATES = 2
"""What the optimizers of torchtitan keep for each parameter, of its own type."""


def state_of(config: Path, flags: Sequence[str]) -> dict:
    """{"parameters": how many, "state_bytes": parameters and optimizer state of one group, over all its ranks}, or
    {"error": sentence} for a config that cannot work."""
    from everstep.titan import cpu

    if not cpu.has_accelerator():
        cpu.stand_in()
    import torch
    from torchtitan.config import TORCH_DTYPE_MAP

    from everstep.titan.load import load_config
    from everstep.titan.trainer import EverstepTrainer

    try:
        loaded = load_config(config, EverstepTrainer.Config, flags)
    except ConfigError as error:
        return {"error": str(error)}
    assert loaded.model_spec is not None
    model_config = loaded.model_spec.model
    model_config.update_from_config(config=loaded)
    with torch.device("meta"):
        model = model_config.build()
    parameters = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    size = TORCH_DTYPE_MAP[loaded.training.dtype].itemsize
    return {"parameters": parameters, "state_bytes": parameters * size * (1 + ADAM_STATES)}


def main() -> None:
    config, *flags = sys.argv[1:]
    print(json.dumps(state_of(Path(config), flags)))


if __name__ == "__main__":
    main()
