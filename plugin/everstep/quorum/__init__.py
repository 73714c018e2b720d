"""Quorums of torchft's lighthouse, process groups between replica groups, and transfers of a state to a joiner."""
