"""A deterministic simulation of a whole run: the real step protocol, quorum code and wire on every rank, over a world
with virtual clocks, threads and sockets, a port of torchft's lighthouse, and faults placed from a seed.

    python -m simulation --seeds 0-99            (scripts/simulate)

`scheduler` is the clock; `system` what a process has of its operating system, `network` what is between hosts, `real`
the code that runs over these; `services` stands in for torchft and torch, `nodes` for lighthouses, `ranks` and
`trainer` for what else the protocol is given; `groups` starts and ends processes as an agent does; `faults` breaks
things; `judge` knows what must never happen; `world` puts them together.
"""
