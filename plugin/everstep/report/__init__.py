"""What a run did, computed from its event log alone: the final lineage, the score, the page.

Nothing here imports torch or asks a live process. `lineage` decides which
commits the final state contains, `sessions` when the run ran, `attempts` and `faults` what failures cost, and
`score` puts it together. docs/report.md defines every figure.
"""
