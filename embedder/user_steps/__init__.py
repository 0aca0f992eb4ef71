"""Users' own steps, `[[step]]`: described by the driver, run in child processes of the tasks that need them."""
