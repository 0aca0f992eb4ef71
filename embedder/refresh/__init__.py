"""The nightly refresh: what is to be done, the run itself, and whether its result may be published."""
