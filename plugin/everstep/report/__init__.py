"""What a run did: the event log, and everything computed from it (score, pages, plots)."""
