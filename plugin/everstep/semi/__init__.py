"""Semi-synchronous training: the calculations of the workers and of the outer step, independent of any trainer."""
