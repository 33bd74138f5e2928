"""What the kernel refers to, in memory: inodes, their policies, requests that may come again."""
