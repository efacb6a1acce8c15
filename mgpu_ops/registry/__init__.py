"""What an op is, and which config a call of it uses."""
