"""The drafters, as everything but their own code knows them: one file each, found by its presence, see record.py."""
