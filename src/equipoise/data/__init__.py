"""From documents to arrays of token ids and back to bytes; nothing here knows a model, and nothing imports torch."""
