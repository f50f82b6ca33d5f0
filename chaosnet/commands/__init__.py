"""The front ends of `chaosnet`: each reads options and calls what does the work, imported only then."""
