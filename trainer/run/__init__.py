"""The folder or URL of a run: identity, ledger, uploads, erasure, comparison."""
