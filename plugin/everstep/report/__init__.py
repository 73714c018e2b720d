"""What a run did, computed from its event log alone: one account, and what is told of it.

Nothing here imports torch or asks a live process. `account` folds the events in one pass; `lineage` decides which
commits the final state contains, `attempts` and `faults` what failures cost, `troubles` what does not hold now. The
report (`score`), the page, the metrics and the webhook are written from the account. docs/report.md defines every
figure.
"""
