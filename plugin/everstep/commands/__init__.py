"""The functions behind `everstep COMMAND`. A function's parameters are the command's arguments, its docstring is the
text of `--help`, and it returns the exit status.

A function has as many parameters as its command has arguments. `flags` holds the arguments that the command does not
know, which are torchtitan's or sbatch's.
"""
