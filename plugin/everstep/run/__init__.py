"""The run directory, the only interface between the processes of a run: files, events, beats, fence, token, exit codes.

This room imports no other room and no torch.
"""
