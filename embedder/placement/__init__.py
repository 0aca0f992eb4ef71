"""What runs where: the fleet, its GPUs, resources of each stage and their nodes."""
