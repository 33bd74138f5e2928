"""What fpfs is compared with: fio, a naive filesystem in Python, DeepSpeed's file writer."""
