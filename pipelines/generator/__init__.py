"""The synthetic log: sessions, skew, histories that shift, and a label that can be learned."""
