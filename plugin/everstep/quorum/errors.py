"""Errors of collectives between groups, between the ranks of a group, and of requests for a quorum."""


class SumsBroken(RuntimeError):
    """A collective between groups did not complete: a member died, hung or could not be reached."""


class QuorumUnavailable(RuntimeError):
    """There is no quorum now: too few groups ask, or the lighthouse is away. Asking again later may succeed."""


class GroupBroken(RuntimeError):
    """A collective of this group's ranks failed, or they were at different ones: the group ends, restarts and heals."""
