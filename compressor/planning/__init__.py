"""From a scan and a budget to a plan."""
