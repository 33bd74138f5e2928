"""What several test folders share: targets, child processes, system calls, comparisons."""
