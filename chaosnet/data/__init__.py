"""A data set, trained on or evaluated, that the whole cluster shares."""
