"""What `everstep COMMAND` does: a function a command, whose parameters are the command's arguments and whose docstring
is its `--help`. It returns the exit status.

There are as many parameters as the command has arguments. `flags` are those that it does not know: torchtitan's, or
sbatch's.
"""
