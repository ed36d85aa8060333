"""Fused weight-normalised layers."""
