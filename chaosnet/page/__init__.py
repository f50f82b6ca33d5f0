"""The cluster as a page in a browser, and as numbers for Prometheus.

picture.py   what is known of a cluster, grown from one status to the next; pure
model.py     of that, what the page draws; pure
metrics.py   the same for Prometheus; pure
feed.py      one watch of the cluster, for all who look
server.py    HTTP
actions.py   what it may change, if it may
of_node.py   the page that a node's own process serves
static/      HTML, CSS and JavaScript, as they are: nothing is built, nothing comes from elsewhere

It needs the extra `dashboard`, which only server.py and metrics.py import.
"""
