"""Coverage-guided fuzzing of everything that reads what others wrote: `make fuzz`, and a short form in the tests."""
