"""Everything that is shown or reported about a run, computed from its event log alone.

Nothing here imports torch or talks to a live process. `account` folds the events in one pass. `lineage` decides which
commits the final state contains, `attempts` and `faults` compute what failures cost, and `troubles` says which
guarantees do not hold now. The report (`score`), the page, the metrics and the webhook are written from the account.
docs/report.md defines every figure.
"""
