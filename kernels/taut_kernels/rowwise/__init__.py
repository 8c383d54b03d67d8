"""What ops along rows share: their tiles, checks of arguments, chunks, quantised stores."""
