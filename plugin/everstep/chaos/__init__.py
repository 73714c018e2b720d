"""Breaking a running run on purpose, and only that run: faults, the targets they are done to, a schedule.

    schedule ── due ──> Fault.plan(target, choose) ──> Injection: whom, with which signal, what the event says
                                                         │ 1. the event, 2. the signal, 3. what is stopped goes on

A run is seen through its events alone (`view`). Nothing here imports torch.
"""
