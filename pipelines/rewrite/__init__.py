"""Any Parquet dataset, smaller."""
