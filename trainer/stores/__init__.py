"""Where embedding rows live while no step uses them."""
