"""What a machine lacks, stood in for: training on CPU where there is no accelerator."""
