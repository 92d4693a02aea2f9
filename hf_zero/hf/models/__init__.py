"""transformers' models: building, loading, generating, saving."""
