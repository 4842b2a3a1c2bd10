"""Grading of programs by tests: the forms of tests, and the processes in which programs and tests run."""
