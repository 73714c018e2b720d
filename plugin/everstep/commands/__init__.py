"""What `everstep COMMAND` does: one file a command, with the dataclass of its arguments and the function that acts."""
