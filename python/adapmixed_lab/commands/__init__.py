"""The laboratory's commands: thin, they parse, call and print."""
