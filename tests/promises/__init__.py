"""What is promised, and planted faults that show that the tests hold it."""
