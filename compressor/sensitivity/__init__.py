"""How much each unit suffers from each format, and together with which others."""
