"""Configuration: a TOML file becomes a torchtitan Config, checked before anything starts.

Where each key of a file stands (`positions`), what torchtitan 0.2's keys are called today (`legacy`), keys set with
their types checked (`assign`), combinations that cannot work (`checks`), and the resolved result as TOML, as an
identity and as a list of differences (`resolved`). The way in is `everstep.titan.load`, which knows torchtitan's
registries.
"""
