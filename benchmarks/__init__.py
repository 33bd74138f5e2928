"""Benchmarks: fpfs against the plain filesystem, fio and other writers, alternating in one run.

`framework` runs groups of contenders, `groups` says what is compared, `places` mounts things,
`worker` is the process that saves and loads, `report` makes the table, the plot and the JSON.
"""
