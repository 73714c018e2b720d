"""What goes wrong between groups, and between the ranks of one."""


class SumsBroken(RuntimeError):
    """A collective between groups did not complete: a member died, hung or could not be reached."""


class QuorumUnavailable(RuntimeError):
    """No quorum now: too few groups, or no lighthouse. Asking again later may succeed."""


class GroupBroken(RuntimeError):
    """A collective of this group's ranks failed or did not pair: the group ends, starts again and heals."""
