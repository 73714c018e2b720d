"""Where a step's tokens come from: data addressed by (step, slot), so that any group can compute any slot.

`documents` and `permutation` give a row in constant time, and `pack` makes token files. Nothing here knows about groups
or quorums, or about torchtitan: the dataloaders are in `titan.data`, whose `slots` says which rows a slot has."""
