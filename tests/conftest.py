"""For all tests."""

import signal

# What is started in the background by a shell ignores SIGINT, and so would all processes that tests send one to.
signal.signal(signal.SIGINT, signal.default_int_handler)
