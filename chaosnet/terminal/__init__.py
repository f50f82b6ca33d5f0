"""What people see in a terminal: tables, bars, and the screen of `chaosnet top`."""
