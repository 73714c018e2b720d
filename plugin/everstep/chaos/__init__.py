"""Breaking a running run on purpose, and only that run: faults, the targets they are done to, a schedule.

    schedule ── due ──> Fault.plan(target, choose) ──> Injection: whom, what the event says, what is stopped
                                                         │ 1. the event, 2. strike
    what is stopped: by a process of its own (`signals`), which has it go on, however the injector ends

A run is seen through its events alone (`view`). Nothing here imports torch.
"""
