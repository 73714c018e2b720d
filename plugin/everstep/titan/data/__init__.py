"""`everstep.data` as torchtitan's dataloaders and tokenizers, and which of them a config means.

`stdlib_text` and `tokens` read rows; `streams` gives any dataloader of torchtitan's by slot."""
