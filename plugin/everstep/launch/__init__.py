"""Starting a run's processes and keeping them up, by one loop (`launcher`). It runs all groups of `everstep run` on one
machine (`supervisor`), one group of a batch job (`agent`), or only a lighthouse (`lighthouse_job`).

A launcher imports torchtitan once and forks workers and lighthouse, so a restart imports nothing. It starts no thread,
and the kernel kills what it forked when it dies. No file here imports torch at module level: not all commands need it.
"""
