"""The parts of the command line `npugrad`; nothing here is imported by `import npugrad_client`."""
