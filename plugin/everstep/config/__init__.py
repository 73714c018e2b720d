"""Configuration: turns a TOML file into a torchtitan Config, and checks it before anything starts.

`source` reads a file, and `positions` finds the line of a key. `legacy` translates the keys of torchtitan 0.2. `assign`
sets keys on a Config and checks their types. `checks` refuses combinations that cannot work. `resolved` writes a Config
as TOML, as an identity, and as differences to another. Callers use `everstep.titan.load`, which knows torchtitan's
registries.
"""
