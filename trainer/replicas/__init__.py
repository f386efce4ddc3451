"""Several processes that train one run together, any of which may die."""
