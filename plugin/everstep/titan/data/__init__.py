"""torchtitan dataloaders and tokenizers for `everstep.data`, and the choice among them that a config makes.

`rows` reads rows of the documents in `texts`. `streams` makes any torchtitan dataloader readable by slot."""
