"""Configuration: a TOML file becomes a torchtitan Config, checked before anything starts.

`load_config` is the way in. The steps behind it are pure: where each key of a file stands (`positions`), what
torchtitan 0.2's keys are called today (`legacy`), the registry's base config (`base`), keys set with their
types checked (`assign`), combinations that cannot work (`checks`), and the resolved result as TOML, as an
identity and as a list of differences (`resolved`). This room knows torchtitan, and neither torchft nor the
trainer."""
