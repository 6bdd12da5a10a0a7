"""Programs: each parses its flags and calls the library."""
