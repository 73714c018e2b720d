"""The source of a step's tokens: data that is addressed by (step, slot), so that any group can compute any slot.

`documents` and `permutation` find a row without reading those before it, and `pack` makes token files. This room knows
nothing of groups, quorums or torchtitan. Dataloaders are in `titan.data`; its `slot_source` defines a slot's rows."""
