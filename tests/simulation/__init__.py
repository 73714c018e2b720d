"""A deterministic simulation of a whole run: the real step protocol and driver on every rank, over a world with a
virtual clock, a port of torchft's lighthouse, and faults placed from a seed.

    python -m simulation --seeds 0-99            (scripts/simulate)

`scheduler` is the clock; `lighthouse` the port; `network`, `healing`, `ranks` and `trainer` stand in for what the
protocol is given; `groups` starts and ends processes as an agent does; `faults` breaks things; `judge` knows what must
never happen; `world` puts them together.
"""
