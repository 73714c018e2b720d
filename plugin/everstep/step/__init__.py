"""The step protocol and nothing else: protocol, driver, ledger, gradient sums.

What a slot, a sum, a quorum or a state is comes in through interfaces (`everstep.step.interfaces`).
"""
