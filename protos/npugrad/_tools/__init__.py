"""Development tools: generators and checks. Not part of the wheel, imported by nothing."""
