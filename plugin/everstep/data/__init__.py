"""Where a step's tokens come from: data addressed by (step, slot), so that any group can compute any slot.

`stdlib_text` and `tokens` read rows of a document store in constant time; `streams` gives the same to any
torchtitan dataloader, one stream per slot. `pack` makes token files. Nothing here knows about groups or
quorums."""
