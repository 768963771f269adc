"""What needs a GPU: correctness of the kernel on the device, and later ceilings, baselines and timing."""
