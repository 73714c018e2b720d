"""Breaking a running run on purpose, and only that run: faults, the targets they are done to, a schedule, a guard.

    schedule ── due ──> Fault.plan(target, choose) ──> Injection: whom, what the event says, what is stopped
                                                         │ 1. the guard is told, 2. the event, 3. strike
    guard (a process of its own) ── end of the fault, or of the injector, however it ends ──> SIGCONT

A run is seen through its events alone (`view`). Nothing here imports torch.
"""
