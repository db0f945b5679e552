"""Load test: scenarios, runs and reports."""
