"""ZipCCL in training frameworks. Each module imports its framework, and is imported by nothing else."""
