"""Would `everstep run` take this config, and how large is a group's training state? `python -m everstep.launch.estimate
ORDER` with a JSON list: config, flags, ranks of a group, whether converters may be dropped.

The model is built on the meta device. A process of its own, because it imports torchtitan; `everstep doctor` starts it.
"""

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

ADAM_STATES = 2
"""What the optimizers of torchtitan keep for each parameter, of its own type."""


def state_of(config: Path, flags: Sequence[str], ranks: int = 1, allow_dropped: bool = False) -> dict:
    """{"parameters": how many, "state_bytes": parameters and optimizer state of one group, over all its ranks,
    "device_bytes": memory of each GPU here, "warnings", "attention": what of it is checked ("12 of 12") and what is
    not, or None}, or {"error": sentence} for a config that cannot work."""
    from everstep.titan import cpu

    if not cpu.has_accelerator():
        cpu.stand_in()
    import torch

    from everstep.launch.prepare import judge
    from everstep.titan.attention import coverage
    from everstep.titan.machine import built_on_meta, choose_attention, trained_parameters

    try:
        loaded, warnings = judge(config, flags, ranks, allow_dropped=allow_dropped)
        choose_attention(loaded)
    except ValueError as error:
        return {"error": str(error)}
    model = built_on_meta(loaded)
    parameters, size = trained_parameters(model, loaded)
    checked = coverage([model]) if loaded.attention_check.enable else None
    devices = [torch.cuda.get_device_properties(index).total_memory for index in range(torch.cuda.device_count())]
    return {
        "parameters": parameters,
        "state_bytes": parameters * size * (1 + ADAM_STATES),
        "device_bytes": devices,
        "warnings": warnings,
        "attention": None if checked is None else [str(checked), checked.missing[:3]],
    }


def main() -> None:
    config, flags, ranks, allow_dropped = json.loads(sys.argv[1])
    os.environ["WORLD_SIZE"] = str(ranks)
    print(json.dumps(state_of(Path(config), flags, ranks, allow_dropped)))


if __name__ == "__main__":
    main()
