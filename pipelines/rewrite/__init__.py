"""Storage reduction of any Parquet dataset."""
