"""The step protocol inside a torchtitan trainer: ledger, gradient sums across groups, healing, audit.

The only room that knows quorum, data, attention and snapshot together.
"""
