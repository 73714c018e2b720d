"""The run directory: the one interface between the processes of a run. Files, events, beats, fence, token, exit codes.

Knows no other room and imports no torch.
"""
