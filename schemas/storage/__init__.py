"""Files at paths and URLs: atomic writes, versions, locks and leases."""
