"""Steps of the user's own, `[[step]]`: described by the driver, run in child processes of the tasks that need them."""
