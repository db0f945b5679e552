"""The wire format `npugrad.v1`: protos, and what `make gen` made of them. Nothing is written by hand here."""
