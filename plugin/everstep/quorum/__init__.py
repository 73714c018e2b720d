"""Who takes part: torchft's quorums, the process groups between replica groups, and how state reaches a joiner."""
