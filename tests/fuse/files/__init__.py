"""What POSIX says of files, directories and names, on a real mount."""
