"""The records of the drafters: one file each, found by its presence; see record.py."""
