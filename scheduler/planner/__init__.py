"""Plans: candidates, policy, reasons, shares."""
