"""Who takes part: torchft's lighthouse and manager, process groups between groups, heal transport."""
