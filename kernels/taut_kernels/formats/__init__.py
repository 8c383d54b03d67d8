"""``quant_method: "taut"``: weights as a checkpoint holds them, read alike by every loader."""
