"""Processes, threads, memory, interrupts and progress: what a fit needs of the machine."""
