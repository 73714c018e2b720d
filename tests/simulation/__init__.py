"""A deterministic simulation of a whole run. Every rank runs the real step protocol, quorum code and wire. Clocks,
threads and sockets are virtual, the lighthouse is a port of torchft's, and the faults are drawn from a seed.

    python -m simulation --seeds 0-99            (scripts/simulate)

`scheduler` is virtual time, `system` the clocks and threads of a process, `network` the sockets and links between
hosts; `real` loads the real code over these. `services` replaces torchft and torch, `nodes` the lighthouse's process,
`ranks` the collectives of a group, `trainer` torchtitan, `files` the run directory. `groups` starts and ends processes
like an agent, `faults` breaks things, `judge` sees what must never happen, and `world` puts all together.
"""
