"""Starting a run and keeping it up: one loop (`launcher`). It is all of `everstep run` on one machine (`supervisor`),
one group of a batch job (`agent`), or a lighthouse alone (`beacon`).

    launcher ── warm process: torchtitan imported once, forks what is asked for; restarts import nothing
      ├── lighthouse
      ├── store of each group
      └── workers

All are the launcher's children, and the kernel kills them when it dies. Nothing here imports torch at module level but
what only the warm process and launchers of groups on several nodes load (`store`, `meeting`).
"""
