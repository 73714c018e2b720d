"""Exhaustive models: every outcome, or every interleaving, within bounds."""
