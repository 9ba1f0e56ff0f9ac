"""The promises of the library, and planted faults that show that the tests would notice."""
