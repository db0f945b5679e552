"""The gRPC edge: servicers, the funnel from exceptions to statuses, health and reflection."""
