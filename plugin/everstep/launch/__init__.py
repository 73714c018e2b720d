"""Starting a run and keeping it up: one loop (`launcher`). It is all of `everstep run` on one machine (`supervisor`),
one group of a batch job (`agent`), or a lighthouse alone (`beacon`).

A launcher imports torchtitan once and forks all others, so a restart imports nothing. It has no thread, and the kernel
kills its children when it dies. Nothing here imports torch at module level: the command line does without.
"""
