"""The parts of bench_training.py: tasks, methods, the workers that run them, and the network between those."""
