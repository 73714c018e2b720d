"""Semi-synchronous training: what workers and the outer step compute, apart from any trainer. docs/semi-sync.md."""
