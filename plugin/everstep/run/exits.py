"""Exit statuses by which the processes of a run tell each other what should happen next."""

USAGE_EXIT = 2
"""What argument parsers exit with, and a config that is not valid: trying again cannot help."""

GAVE_UP_EXIT = 3
"""An agent that should not be started again."""

NODE_BAD_EXIT = 5
"""An agent that should be started again on another node."""

FENCED_EXIT = 6
"""An agent or trainer whose group was started again elsewhere."""

HOPELESS_EXIT = 64
"""A trainer that would end the same way again: training that diverged, for instance."""

UNFIT_EXIT = 65
"""A trainer on a machine that cannot be trusted: its results were wrong repeatedly."""


class TrainerEnds(Exception):
    """A trainer's own decision to end for good: its process ends with `status`, and its agent tells the text."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status
