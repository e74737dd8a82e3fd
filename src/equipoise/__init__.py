"""Equipoise: matched, reproducible, pre-declared comparisons of dense and Mixture-of-Experts language models."""

from __future__ import annotations

__version__ = "0.1.0"
