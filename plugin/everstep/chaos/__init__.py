"""Breaking a running run on purpose, and only that run: faults, the targets they are done to, schedules, a guard.

    schedule ── due ──> Fault.plan(target, choose) ──> Injection: whom, what the event says, how it is undone
                                                         │ 1. the guard notes the undo, 2. the event, 3. strike
    guard (a process of its own) ── end of the fault, or of the injector, however it ends ──> undo

A run is seen through its events and beats alone (`view`). Nothing here imports torch.
"""
