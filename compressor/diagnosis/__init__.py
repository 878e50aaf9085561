"""Why a compressed checkpoint is worse than its original, layer by layer, and what would help."""
