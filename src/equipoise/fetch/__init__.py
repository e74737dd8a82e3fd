"""Corpora from the network: files that arrive whole and verified, can be resumed, and say where they are from."""
