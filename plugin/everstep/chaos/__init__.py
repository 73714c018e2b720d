"""Injects faults into a live run, and into no other: kinds of faults, the targets that they hit, a schedule.

    schedule ── due ──> Kind.plan(fault, target, choose) ──> Injection: processes, signal, fields of the event
                                                               │ 1. write the event, 2. signal, 3. continue what stops

A run is seen through its events alone (`view`). Nothing here imports torch.
"""
