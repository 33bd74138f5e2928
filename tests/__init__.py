"""Tests of fpfs; helpers shared between folders are in `tests.support`."""
