"""chaosnet in trainers that people have: one module for each, which imports its framework (docs/integrations.md)."""
