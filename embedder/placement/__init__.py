"""What runs where: the fleet, its GPUs, the resources of each stage, and their nodes."""
