"""What ops along rows share: tiles, checks, chunks, quantised stores; and quantising rows alone."""
