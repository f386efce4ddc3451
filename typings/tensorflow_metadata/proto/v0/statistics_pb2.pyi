# The package makes its messages at import time and ships no types.
from typing import Any

def __getattr__(name: str) -> Any: ...
