"""Commands of the command line, a file each: a dataclass that tyro parses, and the function that acts on it."""
