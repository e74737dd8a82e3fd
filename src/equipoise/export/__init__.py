"""A trained run as a Hugging Face directory that carries it exactly; needs neither transformers nor torch."""
