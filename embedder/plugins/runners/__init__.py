"""Models of other frameworks, each kind with the program that runs it."""
