"""What every launcher shares: forms, descriptors, tables of tiles, compiling ahead."""
