"""Model folders, and further models beside the main one."""
