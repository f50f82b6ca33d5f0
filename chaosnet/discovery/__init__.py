"""How nodes are found: on this machine, on the network by the cluster's name, and by what was remembered."""
