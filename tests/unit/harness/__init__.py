"""Tests of the tests: the simulated disk, the judge of power cuts, the rig."""
