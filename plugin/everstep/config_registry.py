"""The module that torchtitan imports for `--module everstep --config FILE.toml`.

torchtitan takes the NAME of `--config NAME` as an attribute of this module, and calls it. A module-level
`__getattr__` lets NAME be the path of a TOML file. Everstep is imported in that call only: torchtitan swallows
an ImportError of this module, but one that is raised in the call names what is missing.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any


def __getattr__(name: str) -> Callable[[], Any]:
    """Return a function that loads the TOML file `name`. Any name that ends in `.toml`, or does not begin with
    an underscore, is taken for a file."""
    if name.startswith("_") and not name.endswith(".toml"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def from_toml() -> Any:
        from everstep.config.errors import ConfigError
        from everstep.run.exits import USAGE_EXIT, TrainerEnds
        from everstep.titan.load import load_config
        from everstep.titan.trainer import EverstepTrainer

        try:
            # combinations are checked where the trainer is built, once torchtitan has applied the command line
            return load_config(Path(name), EverstepTrainer.Config, check=False)
        except ConfigError as error:
            raise TrainerEnds(USAGE_EXIT, str(error)) from None

    return from_toml
