"""gpuroute: a client-side router for self-hosted GPU inference."""
