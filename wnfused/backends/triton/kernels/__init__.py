"""The device code: one file a family, with the picture of its data. Importing it needs triton."""
