"""Processes as those of tests/step."""

from step.conftest import context as context
