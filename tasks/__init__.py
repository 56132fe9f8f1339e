"""The application: tasks, the registry that finds them, and the command line. A folder here is a task."""
