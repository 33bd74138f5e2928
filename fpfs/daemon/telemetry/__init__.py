"""Figures, traces and Prometheus."""
