"""`everstep.data` as torchtitan's dataloaders and tokenizers, and which of them a config means.

`rows` reads rows of `texts`; `streams` gives any dataloader of torchtitan's by slot."""
