"""Log, one line a run, metrics and notifications for the people and machines that watch runs."""
