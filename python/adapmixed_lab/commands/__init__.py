"""The laboratory's commands, which only parse, call and print."""
