"""Model folders, and further models besides the main one."""
