"""The run directory, through which the processes of a run meet: files, events, beats, fence, token, exit codes.

This room imports no other room and no torch.
"""
