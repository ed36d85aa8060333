"""The ops: one file each, with schema, fake kernels, derivatives and the public function."""
