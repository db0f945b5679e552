"""The load test: what is sent, what came of it, and what that tells."""
