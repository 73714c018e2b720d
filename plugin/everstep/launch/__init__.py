"""Starting a run and keeping it up: supervisor, agents, warm workers, watchdog.

    supervisor (`everstep run`) ── warm process: torchtitan imported once, forks what is asked for
      ├── lighthouse                forked from the warm process, restarted on the same port
      └── agent, one per group      forked from the warm process, child of the supervisor
            └── fork point          forked from its agent while that is still small
                  └── workers       forked from the fork point: a restart imports nothing

Every arrow is also a lifeline: the kernel kills the lower process when the upper one dies, stopped or not.
Nothing here imports torch at module level except `meeting` (and so `group_agent`), which only an agent loads.
"""
